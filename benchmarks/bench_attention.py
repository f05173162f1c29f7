"""Attention over a paged cache: decode, also of 8 bits, prompts in fp8, mixed calls, shared
prefixes; a decode step from the projection on, as one op and as its parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attention_cases import BLOCK, DIM, HEADS, KV_HEADS, TOKENS, Cache, Shape, counters_for, sdpa
from ridgeline import ops
from ridgeline.roofline import op_cost
from timer import Bench

DECODE = [(1, 160), (32, 160), (128, 160), (1, 1024), (1, 4096), (1, 8192), (1, 32768), (8, 4096),
          (32, 4096), (32, 8192), (128, 4096)]  # fmt: skip


def measure(bench: Bench, impl: str, op: str, **row: Any) -> None:
    """A baseline that this build of PyTorch lacks for a shape is named and left out."""
    try:
        bench.measure(op=op, impl=impl, **row)
    except (RuntimeError, ValueError) as error:
        if impl == "ridgeline":
            raise
        print(f"{op} {impl} {row['fields']}: {str(error).splitlines()[0]}")


# What the decode kernel meets beside 32/8 heads of 128 in blocks of 64: MHA, more and fewer rows a
# KV head, other heads and blocks, a window; prompts, whole, in small blocks, of fp8 queries;
# a draft.
SHAPES = [
    Shape(32, 4096, kv_heads=32),
    Shape(32, 4096, heads=64),
    Shape(32, 4096, heads=40),
    Shape(32, 4096, kv_heads=1),
    Shape(32, 4096, dim=64),
    Shape(32, 4096, dim=256),
    Shape(32, 4096, block=16),
    Shape(32, 4096, block=128),
    Shape(32, 4096, window=1024),
    *(Shape(TOKENS // n, n, n, kv=torch.float8_e4m3fn) for n in (16384, 4096, 1024)),
    Shape(8, 4096, 5),
]


def paged(bench: Bench, shape: Shape) -> None:
    window = shape.window or None

    def call(
        q: Tensor, k: Tensor, v: Tensor, tables: Tensor, lengths: Tensor, cu_q: Tensor,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None, q_scale: Tensor | None = None,
    ) -> Any:  # fmt: skip
        offsets = None if shape.q_len == 1 else cu_q
        return ops.paged_attention(
            q, k, v, tables, lengths, offsets, max_q=shape.q_len, k_scale=k_scale, v_scale=v_scale,
            q_scale=q_scale, window=window, counters=counters,
        )  # fmt: skip

    sample = Cache(bench.device, shape)
    counters = counters_for(sample)
    cost = op_cost(
        "paged_attention", sample.q, sample.k, sample.v, sample.tables, sample.lengths,
        sample.cu_q, k_scale=sample.scales[0] if sample.scales else None, window=window,
    )  # fmt: skip
    bench.measure(
        op="paged_attention", impl="ridgeline", call=call, cost=cost, fields=sample.fields(),
        make=lambda: Cache(bench.device, shape).inputs(), reads_only=True,
    )  # fmt: skip
    if shape == Shape(shape.batch, shape.length) or sample.q.dtype == torch.float8_e4m3fn:
        contiguous(bench, shape, sample.fields())


def fresh(bench: Bench, length: int) -> None:
    """Decode of a sequence alone from what its projection leaves: one op, and its two parts."""
    shape = Shape(1, length)
    sample = Cache(bench.device, shape)
    counters = counters_for(sample)

    def make() -> list[Tensor]:
        cache = Cache(bench.device, shape)
        _, k_cache, v_cache, tables, lengths, _ = cache.inputs()
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        rows = torch.randn(1, sum(heads), shape.dim, device=bench.device, dtype=cache.q.dtype)
        angles = torch.rand(length, shape.dim // 2, device=bench.device)
        block, offset = divmod(length - 1, shape.block)
        slots = tables[0, block : block + 1] * shape.block + offset
        rotary = [lengths - 1, torch.cat((angles.cos(), angles.sin()), -1), slots]
        return [*rows.split(heads, 1), *rotary, k_cache, v_cache, tables, lengths]

    def one(*inputs: Tensor) -> Any:
        return ops.rope_paged_attention(*inputs, counters=counters, weights_ready=True)

    def parts(
        q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor,
        k_cache: Tensor, v_cache: Tensor, tables: Tensor, lengths: Tensor,
    ) -> Any:  # fmt: skip
        ops.rope_write_kv(q, k, v, positions, cos_sin, k_cache, v_cache, slots, weights_ready=True)
        return ops.paged_attention(q, k_cache, v_cache, tables, lengths, counters=counters)

    bench.compare(
        op="rope_paged_attention", calls={"ridgeline": one, "ridgeline_parts": parts}, make=make,
        cost=op_cost("rope_paged_attention", *make()), fields=sample.fields(), reads_only=True,
        chained=bench.device != "cpu",
    )  # fmt: skip


def mixed_call(bench: Bench, parts: list[int]) -> None:
    """Chunks of 2048 queries and decodes, all at 4096 keys, in one call."""
    shape = Shape(len(parts), 4096)

    def make() -> list[Tensor]:
        cache = Cache(bench.device, shape)
        q = torch.randn(sum(parts), HEADS, DIM, device=bench.device, dtype=cache.q.dtype)
        cu_q = torch.tensor([0, *parts], device=bench.device).cumsum(0).int()
        return [q, *cache.inputs()[1:5], cu_q]

    sample = Cache(bench.device, shape)
    counters = counters_for(sample)
    bench.measure(
        op="paged_attention", impl="ridgeline", make=make, reads_only=True,
        call=lambda *inputs: ops.paged_attention(*inputs, max_q=max(parts), counters=counters),
        cost=op_cost("paged_attention", *make()),
        fields={**sample.fields(), "chunks": parts.count(2048), "decodes": parts.count(1)},
    )  # fmt: skip


def contiguous(bench: Bench, shape: Shape, fields: dict[str, Any]) -> None:
    """cuDNN over contiguous keys in bf16, the nearest public baseline inside PyTorch."""
    if bench.device == "cpu":
        return

    def make() -> list[Tensor]:
        keys = (shape.batch, shape.length, KV_HEADS, DIM)
        shapes = [(shape.batch, shape.q_len, HEADS, DIM), keys, keys]
        return [torch.randn(s, device=bench.device, dtype=torch.bfloat16) for s in shapes]

    causal = shape.q_len > 1
    measure(
        bench, "cudnn", "paged_attention", make=make, reads_only=True,
        fields={**fields, "block": 0, "dtype": "bfloat16", "kv_dtype": "bfloat16"},
        call=sdpa(SDPBackend.CUDNN_ATTENTION, causal),
        cost=op_cost("attention", *make(), causal=causal),
    )  # fmt: skip


def prefix(bench: Bench, batch: int, common: int, own: int) -> None:
    """Decode of sequences over the same keys and some of their own, with the hint and without."""
    shared = common // BLOCK

    def cache() -> Cache:
        return Cache(bench.device, Shape(batch, common + own, shared=shared))

    sample = cache()
    fields = {**sample.fields(), "shared": common}
    counters = counters_for(sample)
    for impl, blocks in (("ridgeline", shared), ("ridgeline_plain", 0)):
        bench.measure(
            op="paged_attention", impl=impl, fields=fields, reads_only=True,
            chained=bench.device != "cpu",
            make=lambda: cache().inputs()[:5],
            call=lambda *inputs, n=blocks: ops.paged_attention(
                *inputs, shared_blocks=n, max_q=1, counters=counters
            ),
            cost=op_cost("paged_attention", *sample.inputs()[:5], shared_blocks=shared),
        )  # fmt: skip


def merge(bench: Bench) -> None:
    def make() -> list[Tensor]:
        sides: list[Tensor] = []
        for _ in range(2):
            dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
            sides.append(torch.randn(4096, HEADS, DIM, device=bench.device, dtype=dtype))
            sides.append(torch.randn(HEADS, 4096, device=bench.device))
        return sides

    fields = {"dtype": str(make()[0].dtype).removeprefix("torch."), "rows": 4096, "Hq": HEADS,
              "D": DIM}  # fmt: skip
    bench.measure(op="merge_attention", impl="ridgeline", make=make, call=ops.merge_attention,
                  cost=op_cost("merge_attention", *make()), fields=fields)  # fmt: skip


def main() -> None:
    bench = Bench.from_args(__doc__)
    for batch, length in [(1, 1024)] if bench.device == "cpu" else DECODE:
        paged(bench, Shape(batch, length))
        if bench.device != "cpu":
            for kv in (torch.float8_e4m3fn, torch.int8):
                paged(bench, Shape(batch, length, kv=kv))
    if bench.device != "cpu":
        for shape in SHAPES:
            paged(bench, shape)
        for chunks, decodes in ((2, 64), (2, 0), (0, 64)):  # together, and each alone
            mixed_call(bench, [2048] * chunks + [1] * decodes)
    for length in [1024] if bench.device == "cpu" else [160, 1024, 4096, 16384]:
        fresh(bench, length)
    prefix(bench, *((2, 128, 64) if bench.device == "cpu" else (64, 8192, 128)))
    merge(bench)


if __name__ == "__main__":
    main()
