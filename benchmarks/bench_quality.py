"""What each scheme and method of quantize_checkpoint costs the bundled model in quality.

Not a measurement of time: the loss of held-out modules of the standard library, which the model
was trained without, with its own weights and quantised. Calibrated on modules that it has seen.
"""

from __future__ import annotations

import importlib
import inspect
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ridgeline import LLM, SamplingParams, quantize_checkpoint
from ridgeline._quantize.recipe import RISE_TO_TELL
from ridgeline.tokenizer import Tokenizer
from timer import Bench

MODEL = Path(__file__).resolve().parent.parent / "models" / "demo"
HELD_OUT = ("asyncio.queues", "heapq")
CALIBRATION = (
    "argparse", "ast", "calendar", "collections", "configparser", "dataclasses", "difflib",
    "doctest", "enum", "functools", "http.client", "inspect", "logging", "optparse", "os", "pdb",
)  # fmt: skip
WINDOW, SAMPLES = 1024, 16
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("int4", "rtn", {}),
    ("int4", "rtn", {"clip": True}),
    ("int4", "awq", {}),
    ("int4", "awq", {"clip": True}),
    ("int4", "gptq", {}),
    ("int4", "gptq", {"act_order": "static"}),
    ("int4", "gptq", {"act_order": "group"}),
    ("int4", "awq+gptq", {"act_order": "static"}),
    ("int4", "awq+gptq", {"act_order": "static", "zero_point": True, "clip": True}),
    ("int4", "rtn", {"group_size": 32}),
    ("int4", "gptq", {"group_size": 32, "act_order": "static"}),
    ("int4", "rtn", {"zero_point": True}),
    ("int4", "gptq", {"zero_point": True, "act_order": "static"}),
    ("int4", "rtn", {"group_size": -1}),
    ("int4", "gptq", {"group_size": -1, "act_order": "static"}),
    ("w4a8", "rtn", {}),
    ("w4a8", "gptq", {}),
    ("w4a8", "awq+gptq", {"act_order": "static"}),
    ("fp8", "rtn", {"granularity": "tensor"}),
    ("fp8", "rtn", {}),
    ("fp8", "rtn", {"granularity": "block"}),
    ("fp8", "gptq", {}),
    ("int8", "rtn", {}),
    ("int8", "smoothquant", {}),
    ("int8", "gptq", {}),
    ("int8", "smoothquant+gptq", {}),
)


def source(names: tuple[str, ...]) -> str:
    return "\n\n".join(inspect.getsource(importlib.import_module(name)) for name in names)


def loss_of(folder: Path, device: str) -> tuple[float, int]:
    """Nats a token of the held-out text in windows, and the tokens."""

    def values() -> Iterator[float]:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        with LLM(folder, device=device, num_blocks=64) as llm:
            (ids,) = Tokenizer(MODEL / "tokenizer.json").encode([source(HELD_OUT)])
            for low in range(0, len(ids) - 1, WINDOW):
                (output,) = llm.generate([ids[low : low + WINDOW]], params)
                rows = output.prompt_logprobs or []
                yield from (next(iter(row.values())).logprob for row in rows if row is not None)

    found = list(values())
    return -sum(found) / len(found), len(found)


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/quantization.md."""
    lines = ["| scheme | method | options | loss | |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['scheme']} | {row['method']} | {row['options']} | {row['loss']:.4f} "
        f"| {row['rise']:+.1%}{' **' if row['rise'] > RISE_TO_TELL else ''} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    bench = Bench.from_args(__doc__)
    base, tokens = loss_of(MODEL, bench.device)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of losses that rise: they are what is measured
        text = Path(folder) / "calibration.txt"
        text.write_text(source(CALIBRATION), encoding="utf-8")
        for scheme, method, options in CASES[::7] if bench.quick else CASES:
            out = Path(folder) / "quantised"
            quantize_checkpoint(
                MODEL, out, scheme=scheme, method=method, text=text, samples=SAMPLES, window=WINDOW,
                device=bench.device, overwrite=True, **options,
            )  # fmt: skip
            loss, _ = loss_of(out, bench.device)
            row = {
                "bench": "quality",
                "impl": "ridgeline",
                "scheme": scheme,
                "method": method,
                "options": " ".join(f"{key}={value}" for key, value in options.items()),
                "tokens": tokens,
                "loss_before": round(base, 4),
                "loss": round(loss, 4),
                "rise": round(loss / base - 1, 4),
            }
            bench.add(row | bench.machine())
    print(markdown(bench.rows))


if __name__ == "__main__":
    main()
