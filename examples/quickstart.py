"""Complete a few prompts with the bundled model and show where the time went."""

from pathlib import Path

from ridgeline import LLM, SamplingParams

MODEL = Path(__file__).parent.parent / "models" / "demo"
PROMPTS = ["def fibonacci(n):", "import os\n\ndef walk(path):", "class Stack:\n    "]

with LLM(MODEL, max_num_seqs=8) as llm:
    params = SamplingParams(temperature=0.7, top_p=0.95, seed=1, max_tokens=48)
    for output in llm.generate(PROMPTS, params):
        completion, metrics = output.outputs[0], output.metrics
        print(output.prompt + completion.text)
        print(
            f"--- {len(completion.token_ids)} tokens, {completion.finish_reason}; "
            f"first after {1e3 * metrics.ttft:.0f} ms, the rest in {1e3 * metrics.decode:.0f} ms\n"
        )
