"""``ridgeline quantize``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ridgeline._quantize.checkpoint import quantize_checkpoint
from ridgeline._quantize.gptq import ACT_ORDERS
from ridgeline._quantize.recipe import METHODS
from ridgeline._quantize.schemes import GRANULARITIES, SCHEMES


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "quantize",
        help="write a quantised checkpoint of a model",
        description="Writes the checkpoint in MODEL, which must not be quantised yet, to OUT in "
        "the layout of compressed-tensors, one layer in memory at a time, and measures what the "
        "loss of held-out text rose by. See docs/quantization.md.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="a folder in Hugging Face layout")
    add("out", metavar="OUT", type=Path, help="the folder to make")
    add("--scheme", default="int4", choices=SCHEMES, help="(%(default)s)")
    methods = "; ".join(f"{scheme}: {', '.join(names)}" for scheme, names in METHODS.items())
    add("--method", default="rtn", metavar="NAME", help=f"{methods} (%(default)s)")
    add("--text", metavar="FILE", type=Path,
        help="UTF-8 text like what the model will meet; all methods but rtn need it")  # fmt: skip
    add("--group-size", type=int, default=128, metavar="N",
        help="int4, w4a8: columns that share a scale; -1: all (%(default)s)")  # fmt: skip
    add("--zero-point", action="store_true", help="int4: groups have one")
    add("--clip", action="store_true", help="int4, w4a8: search for the range of each group")
    add("--granularity", default="row", choices=GRANULARITIES, help="fp8 (%(default)s)")
    add("--act-order", default="none", choices=ACT_ORDERS,
        help="gptq: columns of large inputs first; group: int4, groups in that order")  # fmt: skip
    add("--alpha", type=float, default=0.5, metavar="A",
        help="smoothquant: how much activations give to weights (%(default)s)")  # fmt: skip
    add("--damping", type=float, default=0.01, metavar="D",
        help="gptq: share of the moments' mean (%(default)s)")  # fmt: skip
    add("--samples", type=int, default=128, metavar="N",
        help="windows of the text to learn from (%(default)s)")  # fmt: skip
    add("--window", type=int, default=2048, metavar="N", help="tokens of one (%(default)s)")
    add("--skip", action="append", default=[], metavar="NAME",
        help="modules to leave, by the end of their name or a pattern; repeatable")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="of the windows' choice (%(default)s)")
    add("--device", help="cpu, cuda or cuda:N; without it CUDA if it can be used")
    add("--dtype", default="auto", help="of the computation: auto, float32, float16 or bfloat16")
    add("--shard-bytes", type=int, default=4_000_000_000, metavar="N", help="(%(default)s)")
    add("--overwrite", action="store_true", help="replace the checkpoint at OUT")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    given = {key: value for key, value in vars(options).items() if key != "run"}
    print(quantize_checkpoint(**given, progress=sys.stderr.isatty()))
