"""Loading: a checkpoint in shards, from the page cache to the device.

The files have the shapes of Llama-3.1-8B (on the CPU: a small model) and hold zeros. They are
written first, so that they are read from memory, not from a disk; ``host_gb`` is how much the
process's own memory grew meanwhile, mapped files not counted.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench_llm import LLAMA_8B, SMALL
from ridgeline import LLM
from timer import Bench

SHARD_BYTES = 4_000_000_000


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, width, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
    }
    table: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        table |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return table | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


def write(folder: Path, config: dict[str, Any]) -> int:
    """A checkpoint's files; returns the bytes of its tensors."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = total = 0
    for name, shape in shapes(config).items():
        tensor = torch.zeros(shape, dtype=torch.bfloat16)
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    index: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file)
        index |= dict.fromkeys(shard, file)
        shard.clear()
    listing = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def anonymous_bytes() -> int:
    """Of this process's memory, what is not a file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


def main() -> None:
    bench = Bench.from_args(__doc__)
    on_gpu = bench.device != "cpu"
    config = LLAMA_8B if on_gpu else SMALL
    if bench.quick:
        config = config | {"num_hidden_layers": config["num_hidden_layers"] // 2}
    if on_gpu:
        torch.zeros(1, device=bench.device)  # the context's start is not the loading's
    with tempfile.TemporaryDirectory() as folder:
        total = write(Path(folder), config)
        before = anonymous_bytes()
        begin = time.perf_counter()
        memory, loaded = before, begin

        def progress(done: int, count: int) -> None:
            nonlocal memory, loaded
            memory = max(memory, anonymous_bytes())
            loaded = time.perf_counter()

        options: dict[str, Any] = {"max_model_len": 4096, "num_blocks": 128}
        with LLM(folder, device=bench.device, progress=progress, **options):
            ready = time.perf_counter() - begin
        seconds = loaded - begin
        row = {
            "bench": "load",
            "impl": "ridgeline",
            "gb": round(total / 1e9, 3),
            "seconds": round(seconds, 3),
            "gb_s": round(total / seconds / 1e9, 3),
            "ready_s": round(ready, 3),
            "host_gb": round((memory - before) / 1e9, 3),
        }
        bench.add(row | bench.machine())


if __name__ == "__main__":
    main()
