"""Rotary embedding and the writers of the paged cache, beside the same in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.roofline import op_cost
from timer import Bench, compiled

Q_HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
KV_DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
Inputs = list[Any]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def torch_rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> None:
    """What a model in plain PyTorch does: the cache is stored as [blocks, size, heads, D]."""
    cos, sin = cos_sin[positions.long()][:, None].chunk(2, -1)
    q.copy_(_rotate(q, cos, sin))
    k_cache.view(-1, KV_HEADS, DIM).index_copy_(0, slots.long(), _rotate(k, cos, sin))
    v_cache.view(-1, KV_HEADS, DIM).index_copy_(0, slots.long(), v)


def maker(bench: Bench, tokens: int, kv_dtype: str) -> Callable[[], Inputs]:
    """Slices of a fused projection, a table of 8192 positions, slots in one run of blocks."""
    dtype, device = KV_DTYPES[kv_dtype], bench.device
    blocks = -(-tokens // BLOCK) + 1

    def make() -> Inputs:
        heads = Q_HEADS + 2 * KV_HEADS
        qkv = torch.randn(tokens, heads, DIM, device=device, dtype=torch.bfloat16)
        q, k, v = qkv.split((Q_HEADS, KV_HEADS, KV_HEADS), 1)
        positions = torch.randint(0, 8192, (tokens,), dtype=torch.int32, device=device)
        slots = torch.arange(BLOCK, BLOCK + tokens, dtype=torch.int32, device=device)
        table = torch.randn(8192, DIM, device=device)
        k_cache, v_cache = (
            torch.zeros(blocks, BLOCK, KV_HEADS, DIM, device=device).to(dtype) for _ in range(2)
        )
        inputs = [q, k, v, positions, table, k_cache, v_cache, slots]
        if dtype != torch.bfloat16:
            for _ in range(2):
                inputs.append(
                    torch.zeros(blocks, BLOCK, KV_HEADS, dtype=torch.bfloat16, device=device)
                )
        return inputs

    return make


def writers(bench: Bench) -> None:
    for tokens in (1, 64, 8192) if bench.quick else (1, 8, 64, 512, 4096, 8192):
        shape = {"tokens": tokens, "Hq": Q_HEADS, "Hkv": KV_HEADS, "D": DIM, "block": BLOCK}
        for kv_dtype in KV_DTYPES:
            make = maker(bench, tokens, kv_dtype)
            fields = {"dtype": "bfloat16", "kv_dtype": kv_dtype, **shape}
            inputs = make()
            cost = op_cost("rope_write_kv", *inputs)
            rivals = {"ridgeline": ops.rope_write_kv}
            if kv_dtype == "bfloat16":
                rivals |= {
                    "torch_eager": torch_rope_write_kv,
                    "torch_compile": compiled(torch_rope_write_kv),
                }
            for impl, call in rivals.items():
                bench.measure(
                    op="rope_write_kv",
                    impl=impl,
                    make=make,
                    call=call,
                    cost=cost,
                    fields=fields,
                    chained=impl == "ridgeline",
                )
            bench.measure(
                op="write_kv",
                impl="ridgeline",
                make=make,
                call=lambda q, k, v, p, t, kc, vc, slots, *s: ops.write_kv(k, v, kc, vc, slots, *s),
                cost=op_cost("write_kv", *inputs[1:3], *inputs[5:]),
                fields=fields,
                chained=True,
            )
        bench.measure(
            op="rope",
            impl="ridgeline",
            make=maker(bench, tokens, "bfloat16"),
            call=lambda q, k, v, positions, table, *rest: ops.rope(q, k, positions, table),
            cost=op_cost("rope", *maker(bench, tokens, "bfloat16")()[:2], inputs[3], inputs[4]),
            fields={"dtype": "bfloat16", **shape},
            chained=True,
        )


def torch_copy_blocks(k_cache: Tensor, v_cache: Tensor, pairs: Tensor) -> None:
    source, destination = pairs.long().unbind(1)
    k_cache.index_copy_(0, destination, k_cache[source])
    v_cache.index_copy_(0, destination, v_cache[source])


def copies(bench: Bench) -> None:
    for pairs in (1, 64) if bench.quick else (1, 8, 64, 512):

        def make(pairs: int = pairs) -> Inputs:
            shape = (2 * pairs + 1, KV_HEADS, BLOCK, DIM)
            caches = [
                torch.zeros(shape, dtype=torch.bfloat16, device=bench.device).transpose(1, 2)
                for _ in range(2)
            ]
            order = torch.randperm(2 * pairs, device=bench.device, dtype=torch.int32) + 1
            return [*caches, order.view(pairs, 2)]

        shape = {"pairs": pairs, "Hkv": KV_HEADS, "D": DIM, "block": BLOCK, "dtype": "bfloat16"}
        for impl, call in (("ridgeline", ops.copy_blocks), ("torch_eager", torch_copy_blocks)):
            bench.measure(
                op="copy_blocks",
                impl=impl,
                make=make,
                call=call,
                cost=op_cost("copy_blocks", *make()),
                fields=shape,
                chained=impl == "ridgeline",
            )


if __name__ == "__main__":
    run = Bench.from_args(__doc__)
    writers(run)
    copies(run)
