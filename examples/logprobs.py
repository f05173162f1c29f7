"""How surprised is the model? Log-probabilities of a text, and the best continuations."""

import math
from pathlib import Path

from ridgeline import LLM, SamplingParams

MODEL = Path(__file__).parent.parent / "models" / "demo"
TEXTS = ["import os\nimport sys\n", "import sys sys import os\n"]

with LLM(MODEL, max_num_seqs=8) as llm:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3, prompt_logprobs=0)
    for output in llm.generate(TEXTS, params):
        entries = [entry for entry in output.prompt_logprobs if entry is not None]
        own = [next(iter(entry.values())).logprob for entry in entries]  # the text's own token
        perplexity = math.exp(-sum(own) / len(own))
        best = sorted(output.outputs[0].logprobs[0].values(), reverse=True)
        following = ", ".join(f"{e.decoded_token!r} {math.exp(e.logprob):.0%}" for e in best)
        print(f"{output.prompt!r}: perplexity {perplexity:.1f}; next {following}")
