"""Print text as it comes, stop at a string, and give up on a request in the middle."""

from pathlib import Path

from ridgeline import LLM, SamplingParams

MODEL = Path(__file__).parent.parent / "models" / "demo"

with LLM(MODEL, max_num_seqs=8) as llm:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=64, stop="\n\n")
    for piece in llm.stream("def main():", params):
        print(piece.text, end="", flush=True)
    print(f"\n--- ended by {piece.finish_reason}: {piece.stop_reason!r}")

    # Two outputs of one prompt share its computation; the first to open a comment ends both.
    params = SamplingParams(n=2, temperature=0.9, seed=5, max_tokens=64)
    texts = ["", ""]
    for piece in llm.stream("class Queue:\n", params):
        texts[piece.index] += piece.text
        if "#" in piece.text:
            llm.abort(piece.request_id)
    for text in texts:
        print("---", repr(text))
