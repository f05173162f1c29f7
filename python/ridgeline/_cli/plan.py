"""``ridgeline plan``."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from ridgeline._options import EngineOptions
from ridgeline.kv_cache import KV_DTYPES, KVCacheLayout
from ridgeline.memory import plan_memory, stored_bytes
from ridgeline.models.config import DTYPES, ModelConfig
from ridgeline.models.linear import QUANTIZATIONS
from ridgeline.models.loader import check_quantization

_UNITS = {"": 1, "M": 10**6, "G": 10**9, "T": 10**12, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="what of a GPU's memory a model would take",
        description="Prints what weights, buffers, activations and graphs of a model would take "
        "of a GPU, what is left for its KV cache, and how many sequences fit into that. Reads the "
        "configuration alone and needs no GPU. Options as those of LLM.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="a folder with a config.json, or that file")
    add("--gpu-memory", required=True, metavar="SIZE", type=size, help="80GiB, 141GB")
    add("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    add("--quantization", choices=QUANTIZATIONS)
    add("--kv-cache-dtype", default="auto", choices=("auto", *KV_DTYPES))
    add("--block-size", type=int, default=64, metavar="N")
    add("--max-model-len", type=int, metavar="N")
    add("--max-num-seqs", type=int, default=256, metavar="N")
    add("--max-num-batched-tokens", type=int, default=8192, metavar="N")
    add("--length", type=int, action="append", default=[], metavar="N",
        help="tokens of a sequence to count; repeatable")  # fmt: skip
    parser.set_defaults(run=run)


def size(text: str) -> int:
    """Bytes of "80GiB", "141GB", "81920MiB" or a plain number."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([MGT]I?)?B?", text.strip().upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 80GiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def run(options: argparse.Namespace) -> None:
    folder = options.model.parent if options.model.name == "config.json" else options.model
    config = ModelConfig.from_path(folder)
    own = ("model", "gpu_memory", "length", "run")
    engine = EngineOptions(**{k: v for k, v in vars(options).items() if k not in own})
    stored = config.stored_format
    kept_as = None if stored is None else stored.kept_as
    check_quantization(engine.quantization, stored is not None, kept_as)
    dtype = DTYPES.get(engine.dtype, config.dtype)
    if engine.dtype == "auto" and config.dtype == DTYPES["float32"]:
        dtype = DTYPES["bfloat16"]  # as on a GPU
    context = engine.context(config)
    plan = plan_memory(
        config,
        KVCacheLayout.of(config, engine.block_size, engine.kv_cache_dtype, dtype),
        dtype,
        quantization=engine.quantization,
        max_model_len=context,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        budget=int(options.gpu_memory * engine.gpu_memory_utilization),
        num_blocks=None,
        on_gpu=True,
        graphs=True,
        stored_weights=stored_bytes(config, folder, dtype, engine.quantization),
    )
    plan.check()
    if any(length > context for length in options.length):
        raise ValueError(f"length must be at most {context} (max_model_len), got {options.length}")
    lengths = options.length or sorted({min(n, context) for n in (1024, 8192, context)})
    fits = [(length, plan.sequences(length)) for length in lengths]
    print(plan)
    print(f"\n{plan.num_blocks} blocks of {engine.block_size} tokens, one of them unused")
    for length, fit in fits:
        most = "" if fit <= engine.max_num_seqs else f" ({engine.max_num_seqs} run at a time)"
        print(f"{fit:>8} sequences of {length} tokens{most}")
