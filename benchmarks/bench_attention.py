"""Attention: prefill of 16k tokens against cuDNN and flash, paged decode, and both over fp8; a
decode step from the projection on, as one op and as its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ridgeline import ops
from ridgeline.roofline import op_cost
from timer import Bench

TOKENS, HIDDEN = 16384, 2048
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
DECODE = [(1, 160), (32, 160), (128, 160), (1, 1024), (1, 4096), (1, 8192), (1, 32768), (8, 4096),
          (32, 4096), (32, 8192), (128, 4096)]  # fmt: skip
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "torch_flash": SDPBackend.FLASH_ATTENTION}


def sdpa(backend: SDPBackend, causal: bool) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=grouped
            )

    return call


def measure(bench: Bench, impl: str, op: str, **row: Any) -> None:
    """A baseline that this build of PyTorch lacks for a shape is named and left out."""
    try:
        bench.measure(op=op, impl=impl, **row)
    except (RuntimeError, ValueError) as error:
        if impl == "ridgeline":
            raise
        print(f"{op} {impl} {row['fields']}: {str(error).splitlines()[0]}")


def prefill(bench: Bench, dim: int, length: int, causal: bool) -> None:
    batch, heads = TOKENS // length, HIDDEN // dim
    if bench.device == "cpu":
        batch = 1

    def make() -> list[Tensor]:
        shape = (batch, length, heads, dim)
        dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
        return [torch.randn(shape, device=bench.device, dtype=dtype) for _ in range(3)]

    fields = {"dtype": str(make()[0].dtype).removeprefix("torch."), "B": batch, "Sq": length,
              "Sk": length, "Hq": heads, "Hkv": heads, "D": dim, "causal": causal}  # fmt: skip
    backends = {"torch_eager": SDPBackend.FLASH_ATTENTION} if bench.device == "cpu" else BACKENDS
    calls = {"ridgeline": lambda q, k, v: ops.attention(q, k, v, causal=causal)}
    for impl, backend in backends.items():
        call = sdpa(backend, causal)
        try:
            call(*make())
            calls[impl] = call
        except RuntimeError as error:  # this build of PyTorch lacks it for the shape
            print(f"attention {impl} {fields}: {str(error).splitlines()[0]}")
    cost = op_cost("attention", *make(), causal=causal)
    bench.compare(op="attention", calls=calls, make=make, cost=cost, fields=fields)


def packed(bench: Bench, lengths: list[int], name: str, before: int = 0) -> None:
    """Causal prefill of sequences side by side, grouped heads, `before` keys ahead of each."""
    keys = [length + before for length in lengths]
    ends = [torch.tensor([0, *n]).cumsum(0).int().to(bench.device) for n in (lengths, keys)]
    longest = [max(lengths), max(keys)]

    def make() -> list[Tensor]:
        shapes = [(sum(lengths), HEADS, DIM)] + [(sum(keys), KV_HEADS, DIM)] * 2
        return [torch.randn(s, device=bench.device, dtype=torch.bfloat16) for s in shapes]

    fields = {"dtype": "bfloat16", "B": len(lengths), "Sq": longest[0], "Sk": longest[1],
              "Hq": HEADS, "Hkv": KV_HEADS, "D": DIM, "causal": True, "lengths": name}  # fmt: skip
    bench.measure(
        op="attention_varlen", impl="ridgeline", make=make, fields=fields,
        call=lambda q, k, v: ops.attention_varlen(q, k, v, *ends, *longest),
        cost=op_cost("attention_varlen", *make(), *ends, *longest),
    )  # fmt: skip


def mixed_lengths(total: int) -> list[int]:
    """Lengths from 64 to 8192 with odds of 1 / length, the same in every run."""
    draw = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        length = int(64 * 128.0 ** torch.rand((), generator=draw).item())
        lengths.append(min(length, total - sum(lengths)))
    return lengths


@dataclass(frozen=True)
class Shape:
    """`batch` sequences of `length` keys and `q_len` queries; all begin with the same `shared`
    blocks."""

    batch: int
    length: int
    q_len: int = 1
    kv: torch.dtype = torch.bfloat16
    block: int = BLOCK
    shared: int = 0
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM
    window: int = 0


class Cache:
    """One layer's paged cache, blocks in random order."""

    def __init__(self, device: str, shape: Shape) -> None:
        self.device, self.shape = device, shape
        batch, block, q_len = shape.batch, shape.block, shape.q_len
        count = -(-shape.length // block)
        rows = (batch * count + 1, shape.kv_heads, block, shape.dim)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        kv = dtype if shape.kv == torch.bfloat16 else shape.kv
        self.k, self.v = (
            torch.randn(rows, device=device, dtype=dtype).to(kv).transpose(1, 2) for _ in range(2)
        )
        order = torch.randperm(batch * count, device=device) + 1
        self.tables = order.int().view(batch, count)
        self.tables[:, : shape.shared] = self.tables[0, : shape.shared].clone()
        self.lengths = torch.full((batch,), shape.length, dtype=torch.int32, device=device)
        self.q = torch.randn(batch * q_len, shape.heads, shape.dim, device=device, dtype=dtype)
        self.cu_q = torch.arange(batch + 1, dtype=torch.int32, device=device) * q_len
        self.scales = []
        if kv != dtype:
            scale = torch.full(self.k.shape[:3], 0.5, dtype=torch.bfloat16, device=device)
            self.scales = [scale, scale.clone()]
        if kv == torch.float8_e4m3fn and q_len > 1:  # queries are fp8, too
            self.scales.append(torch.full(self.q.shape[:2], 0.5, device=device))
            self.q = self.q.to(kv)

    def inputs(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.tables, self.lengths, self.cu_q, *self.scales]

    def fields(self) -> dict[str, Any]:
        shape = self.shape
        fields = {"dtype": str(self.q.dtype).removeprefix("torch."), "B": shape.batch,
                  "L": shape.length, "q_len": shape.q_len, "Hq": shape.heads,
                  "Hkv": shape.kv_heads, "D": shape.dim, "block": shape.block,
                  "kv_dtype": str(self.k.dtype).removeprefix("torch.")}  # fmt: skip
        return {**fields, "window": shape.window} if shape.window else fields


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
    Shape(1, 4096, 2048),
    Shape(1, 4096, 4096),
    Shape(1, 4096, 4096, block=16),
    *(Shape(TOKENS // n, n, n, kv=torch.float8_e4m3fn) for n in (16384, 4096, 1024)),
    Shape(8, 4096, 5),
]


def counters_for(sample: Cache) -> Tensor:
    pairs = sample.shape.batch * sample.shape.kv_heads
    return torch.zeros(pairs + 2, dtype=torch.int32, device=sample.device)


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
    small = bench.quick or bench.device == "cpu"
    lengths = [512, 1024] if bench.device == "cpu" else [1024, 16384] if small else LENGTHS
    for dim in [128] if small else [64, 128, 256]:
        for causal in (False, True):
            for length in lengths:
                prefill(bench, dim, length, causal)
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
        packed(bench, [4096], "one")
        packed(bench, [2048], "one", before=2048)
        packed(bench, [2048] * 16, "uniform")
        packed(bench, mixed_lengths(2 * TOKENS), "mixed")
    for length in [1024] if bench.device == "cpu" else [160, 1024, 4096, 16384]:
        fresh(bench, length)
    prefix(bench, *((2, 128, 64) if bench.device == "cpu" else (64, 8192, 128)))
    merge(bench)


if __name__ == "__main__":
    main()
