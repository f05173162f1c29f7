"""Rows of attention: contiguous, packed, paged, and the merge."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import attention_reference as reference
import ridgeline
from op_table import Context, Error, Lazy, OpCase, Sample, full, integers, normal, tensor, uniform

BLOCK = 16


class PagedCase:
    """Recipes of one paged call: scattered blocks, and NaN wherever no key of a sequence lies."""

    def __init__(
        self, lengths: list[int], *, q_lens: list[int] | None = None, heads: int = 4,
        kv_heads: int = 2, dim: int = 64, block: int = BLOCK, kv: torch.dtype | None = None,
        seed: int = 0, shared: int = 0,
    ) -> None:  # fmt: skip
        self.lengths, self.q_lens = lengths, q_lens
        self.heads, self.kv_heads, self.dim, self.block = heads, kv_heads, dim, block
        self.kv = kv
        blocks = [-(-n // block) for n in lengths]
        order = torch.randperm(sum(blocks) + 2, generator=torch.Generator().manual_seed(seed)) + 1
        self.num_blocks = len(order) + 1
        self.tables = torch.zeros(len(lengths), max([*blocks, 1]), dtype=torch.int32)
        used = 0
        for row, count in zip(self.tables, blocks):
            row[:count] = order[used : used + count].int()
            row[: min(shared, count)] = self.tables[0, : min(shared, count)]
            used += count

    def _fill(self, context: Context, cache: Tensor) -> Tensor:
        """Poison outside the sequences' slots (an int8 cache is poisoned by its scales)."""
        kept = torch.zeros(self.num_blocks, self.block, dtype=torch.bool)
        for row, length in zip(self.tables.long(), self.lengths):
            position = torch.arange(length)
            kept[row[position // self.block], position % self.block] = True
        if not cache.dtype.is_floating_point:
            return cache
        wide = cache.float()
        wide[~kept] = math.nan
        return wide.to(cache.dtype)

    def cache(self) -> Lazy:
        shape = (self.num_blocks, self.kv_heads, self.block, self.dim)

        def make(context: Context) -> Tensor:
            values = torch.randn(shape, generator=context.generator)
            dtype = self.kv or context.dtype
            if dtype == torch.int8:
                values = (values * 40).clamp(-127, 127).round()
            values = self._fill(context, values.transpose(1, 2).to(dtype))
            # Stored with the block's heads apart, as the engine does.
            stored = values.transpose(1, 2).contiguous().to(context.device)
            return stored.transpose(1, 2)

        return Lazy(make)

    def scale(self) -> Lazy:
        shape = (self.num_blocks, self.block, self.kv_heads)

        def make(context: Context) -> Tensor:
            values = torch.rand(shape, generator=context.generator) * 0.04 + 0.01
            return self._fill(context, values.to(torch.bfloat16)).to(context.device)

        return Lazy(make)

    def fp8_queries(self) -> dict[str, Any]:
        """Of the kernels that expand them: few a sequence, or for those that have no fp8 tile."""
        rows = sum(self.q_lens or [1] * len(self.lengths))
        return self.inputs(
            q=normal(rows, self.heads, self.dim, scale=40, dtype=torch.float8_e4m3fn),
            q_scale=uniform(rows, self.heads, low=0.01, high=0.05, dtype=torch.float32),
        )

    def inputs(self, **options: Any) -> dict[str, Any]:
        q_lens = self.q_lens or [1] * len(self.lengths)
        found: dict[str, Any] = {
            "q": normal(sum(q_lens), self.heads, self.dim),
            "k_cache": self.cache(),
            "v_cache": self.cache(),
            "block_tables": tensor(self.tables.tolist(), torch.int32),
            "seq_lens": tensor(self.lengths, torch.int32),
            "return_lse": True,
        }
        if self.q_lens is not None:
            offsets = torch.tensor([0, *q_lens]).cumsum(0).tolist()
            found |= {"cu_q": tensor(offsets, torch.int32), "max_q": max(q_lens)}
        if self.kv is not None:
            found |= {"k_scale": self.scale(), "v_scale": self.scale()}
        return found | options


def _qkv(batch: int, q_len: int, k_len: int, heads: int, kv_heads: int, dim: int) -> dict[str, Any]:
    return {
        "q": normal(batch, q_len, heads, dim),
        "k": normal(batch, k_len, kv_heads, dim),
        "v": normal(batch, k_len, kv_heads, dim),
        "return_lse": True,
    }


def _qkv_packed(q_lens: list[int], k_lens: list[int], heads: int, kv_heads: int) -> dict[str, Any]:
    cu_q, cu_k = ([0, *torch.tensor(lens).cumsum(0).tolist()] for lens in (q_lens, k_lens))
    return {
        "q": normal(cu_q[-1], heads, 64),
        "k": normal(cu_k[-1], kv_heads, 64),
        "v": normal(cu_k[-1], kv_heads, 64),
        "cu_q": tensor(cu_q, torch.int32),
        "cu_k": tensor(cu_k, torch.int32),
        "max_q": max(q_lens),
        "max_k": max(k_lens),
        "return_lse": True,
    }


_FP8 = torch.float8_e4m3fn
_SINKS = tensor([0.5, -1.0, 3.0, -math.inf], torch.float32)

ATTENTION = OpCase(
    name="attention",
    op=ridgeline.ops.attention,
    reference=reference.attention,
    competitor=reference.attention,
    samples=[
        Sample("few queries, a tile and one key", **_qkv(2, 3, 65, 4, 2, 64)),
        Sample("whole tiles of queries and keys", **_qkv(1, 128, 128, 2, 2, 64)),
        Sample("one query and key past the tiles", **_qkv(1, 129, 129, 2, 1, 128)),
        Sample("one short of the tiles, not causal", **_qkv(2, 127, 63, 2, 2, 64), causal=False),
        Sample("a chunk: fewer queries than keys", **_qkv(1, 70, 200, 5, 1, 80)),
        Sample("more queries than keys: the first rows see nothing", **_qkv(1, 90, 20, 2, 2, 96)),
        Sample("the same with few queries", **_qkv(1, 9, 3, 2, 2, 96)),
        Sample("eight query heads a KV head", **_qkv(2, 33, 33, 16, 2, 112)),
        Sample("decode: one query, keys of several splits", **_qkv(3, 1, 1100, 8, 1, 128)),
        Sample("the widest heads", **_qkv(1, 80, 80, 2, 1, 256)),
        Sample("the widest heads, decode", **_qkv(1, 1, 300, 2, 1, 256)),
        Sample("heads of 192", **_qkv(1, 70, 70, 2, 1, 192)),
        Sample("a head size that no tile has", **_qkv(1, 70, 70, 2, 1, 40)),
        Sample("the smallest head size", **_qkv(1, 5, 70, 2, 2, 8)),
        Sample("no queries", **_qkv(2, 0, 5, 2, 2, 64)),
        Sample("no keys: zeros and -inf", **_qkv(2, 3, 0, 2, 2, 64)),
        Sample("no batch", **_qkv(0, 3, 3, 2, 2, 64)),
        Sample("a window within a tile", **_qkv(1, 140, 140, 2, 1, 64), window=7),
        Sample("a window across tiles", **_qkv(1, 80, 300, 2, 1, 64), window=100),
        Sample("a window in decode: whole splits hidden", **_qkv(1, 1, 1100, 2, 1, 128), window=70),
        Sample("softcap and a scale", **_qkv(1, 70, 70, 4, 2, 64), softcap=5.0, scale=0.3),
        Sample("a negative scale", **_qkv(1, 70, 70, 4, 2, 64), scale=-0.2),
        Sample("sinks", **_qkv(1, 70, 70, 4, 2, 64), sinks=_SINKS),
        Sample("sinks in decode of several splits", **_qkv(2, 1, 700, 4, 2, 128), sinks=_SINKS),
        Sample("sinks where no key is seen", **_qkv(16, 4, 2, 4, 2, 64), sinks=_SINKS),
        Sample(
            "strided: heads before rows, every other key",
            q=normal(1, 4, 70, 64).transpose(1, 2),
            k=normal(1, 2, 140, 64).transpose(1, 2)[:, ::2],
            v=normal(1, 140, 2, 64)[:, ::2],
            return_lse=True,
        ),
    ],
    errors=[
        Error(r"k: expected the head size of q, 64, got 32",
              q=normal(1, 2, 2, 64), k=normal(1, 2, 2, 32), v=normal(1, 2, 2, 32)),
        Error(r"v: expected the shape of k, \[1, 2, 2, 64\], got \[1, 3, 2, 64\]",
              q=normal(1, 2, 2, 64), k=normal(1, 2, 2, 64), v=normal(1, 3, 2, 64)),
        Error(r"q: expected a multiple of the 2 heads of k, got 3",
              q=normal(1, 2, 3, 64), k=normal(1, 2, 2, 64), v=normal(1, 2, 2, 64)),
        Error(r"head size that is a multiple of 8 from 8 to 256, got 12",
              **_qkv(1, 2, 2, 2, 2, 12)),
        Error(r"head size that is a multiple of 8 from 8 to 256, got 264",
              **_qkv(1, 2, 2, 2, 2, 264)),
        Error(r"k: expected dtype float32, got bfloat16",
              q=normal(1, 2, 2, 64), k=normal(1, 2, 2, 64, dtype=torch.bfloat16),
              v=normal(1, 2, 2, 64)),
        Error(r"q: expected dtype float32 or float16 or bfloat16, got int64",
              q=integers(0, 2, 1, 2, 2, 64, dtype=torch.int64), k=normal(1, 2, 2, 64),
              v=normal(1, 2, 2, 64)),
        Error(r"q: expected 4 dimensions, got shape \[2, 2, 64\]",
              q=normal(2, 2, 64), k=normal(1, 2, 2, 64), v=normal(1, 2, 2, 64)),
        Error(r"q: expected the last dimension contiguous",
              q=normal(1, 2, 64, 2).transpose(2, 3), k=normal(1, 2, 2, 64), v=normal(1, 2, 2, 64)),
        Error(r"k: expected shape \[1, .*, got \[2, 2, 2, 64\]",
              q=normal(1, 2, 2, 64), k=normal(2, 2, 2, 64), v=normal(2, 2, 2, 64)),
        Error(r"sinks: expected shape \[2\], got \[3\]",
              **_qkv(1, 2, 2, 2, 2, 64), sinks=normal(3)),
        Error(r"window: expected None or an integer from 1 on, got 0",
              **_qkv(1, 2, 2, 2, 2, 64), window=0),
        Error(r"window: expected none where causal is false",
              **_qkv(1, 2, 2, 2, 2, 64), window=4, causal=False),
        Error(r"softcap: expected 0 \(none\) or a positive number, got -1",
              **_qkv(1, 2, 2, 2, 2, 64), softcap=-1.0),
    ],
)  # fmt: skip

VARLEN = OpCase(
    name="attention_varlen",
    op=ridgeline.ops.attention_varlen,
    reference=reference.attention_varlen,
    competitor=reference.attention_varlen,
    samples=[
        Sample("decode, a chunk, an empty sequence and a long one",
               **_qkv_packed([1, 5, 0, 70], [40, 65, 0, 70], 4, 2)),
        Sample("not causal", **_qkv_packed([64, 30], [64, 129], 4, 4), causal=False),
        Sample("queries without keys, keys without queries",
               **_qkv_packed([3, 0, 2], [0, 9, 2], 2, 1)),
        Sample("every option at once", **_qkv_packed([70, 1, 20], [150, 300, 20], 4, 1),
               window=50, softcap=8.0, scale=0.2, sinks=_SINKS),
        Sample("rows before and after the sequences are zero",
               q=normal(12, 2, 64), k=normal(9, 2, 64), v=normal(9, 2, 64), return_lse=True,
               cu_q=tensor([2, 4, 9], torch.int32), cu_k=tensor([1, 4, 9], torch.int32),
               max_q=5, max_k=5),
        Sample("bounds above the lengths",
               **_qkv_packed([9, 2], [9, 2], 2, 2) | {"max_q": 500, "max_k": 1000}),
    ],
    errors=[
        Error(r"cu_k: expected shape \[3\], got \[2\]",
              **_qkv_packed([1, 2], [1, 2], 2, 2) | {"cu_k": tensor([0, 3], torch.int32)}),
        Error(r"q: expected dtype float32 or float16 or bfloat16, got int8",
              **_qkv_packed([1, 2], [1, 2], 2, 2)
              | {"q": integers(0, 2, 3, 2, 64, dtype=torch.int8)}),
        Error(r"cu_q: expected dtype int32, got int64",
              **_qkv_packed([1, 2], [1, 2], 2, 2) | {"cu_q": tensor([0, 1, 3], torch.int64)}),
    ],
)  # fmt: skip

_EIGHT_SINKS = normal(8, dtype=torch.float32)
_EDGES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 63, 64, 65]

PAGED = OpCase(
    name="paged_attention",
    op=ridgeline.ops.paged_attention,
    reference=reference.paged_attention,
    competitor=reference.paged_attention,
    samples=[
        Sample("decode at the edges of block and tile", **PagedCase(_EDGES).inputs()),
        Sample("decode of several splits beside short ones",
               **PagedCase([513, 1, 700, 1300], dim=128, block=64).inputs()),
        Sample("a mixed batch: prefill, decode, chunk, verify, empty",
               **PagedCase([130, 77, 150, 65, 0], q_lens=[130, 1, 40, 5, 0]).inputs()),
        Sample("max_q unknown",
               **PagedCase([20, 7], q_lens=[20, 1]).inputs() | {"max_q": None}),
        Sample("more queries than keys", **PagedCase([3, 70], q_lens=[6, 90]).inputs()),
        Sample("one query head a KV head", **PagedCase([33, 64], heads=2).inputs()),
        Sample("five query heads a KV head", **PagedCase([33, 640], heads=5, kv_heads=1).inputs()),
        Sample("a group wider than the MMA's rows",
               **PagedCase([33, 640], heads=71, kv_heads=1).inputs()),
        Sample("block size 48, no power of two", **PagedCase([47, 48, 49, 200], block=48).inputs()),
        Sample("block size 256", **PagedCase([255, 257], block=256).inputs()),
        Sample("head size 80", **PagedCase([100, 300], dim=80).inputs()),
        Sample("head size 256", **PagedCase([100, 300], dim=256).inputs()),
        Sample("head size 192, a chunk", **PagedCase([100], q_lens=[80], dim=192).inputs()),
        Sample("head size 40", **PagedCase([100, 300], dim=40).inputs()),
        Sample("left padding; one sequence is all padding",
               **PagedCase([70, 40, 90], q_lens=[66, 1, 90]).inputs(
                   k_start=tensor([65, 40, 3], torch.int32))),
        Sample("a window that ends within a block",
               **PagedCase([70, 600], q_lens=[70, 1]).inputs(window=20)),
        Sample("softcap, scale and sinks",
               **PagedCase([70, 600], q_lens=[70, 1]).inputs(
                   softcap=4.0, scale=0.3, sinks=_SINKS)),
        Sample("sinks of an empty sequence", **PagedCase([0, 5]).inputs(sinks=_SINKS)),
        Sample("not causal", **PagedCase([70, 20], q_lens=[66, 3]).inputs(causal=False)),
        Sample("fp8 cache, decode", **PagedCase(_EDGES, kv=_FP8).inputs()),
        Sample("fp8 cache, several splits",
               **PagedCase([700, 2500], kv=_FP8, dim=128, block=64).inputs()),
        Sample("fp8 cache, prefill", **PagedCase([130, 65], q_lens=[130, 9], kv=_FP8).inputs()),
        Sample("fp8 cache, head size 40", **PagedCase([90], q_lens=[70], kv=_FP8, dim=40).inputs()),
        Sample("int8 cache, decode", **PagedCase(_EDGES, kv=torch.int8).inputs()),
        Sample("int8 cache, prefill, head size 256",
               **PagedCase([130], q_lens=[130], kv=torch.int8, dim=256).inputs()),
        Sample("fp8 queries, decode", **PagedCase(_EDGES, kv=_FP8).fp8_queries()),
        Sample("fp8 queries: verify, no row, a row alone",
               **PagedCase([700, 0, 65], q_lens=[5, 0, 1], kv=_FP8, dim=128).fp8_queries()),
        Sample("fp8 queries, prefill of heads of 192",
               **PagedCase([130, 65], q_lens=[130, 9], kv=_FP8, dim=192).fp8_queries()),
        Sample("fp8 queries, prefill of an int8 cache",
               **PagedCase([130, 65], q_lens=[70, 9], kv=torch.int8).fp8_queries()),
        Sample("few rows beside many: one query, five, sixteen, none",
               **PagedCase([300, 513, 100, 0], q_lens=[1, 5, 16, 0], heads=8).inputs()),
        Sample("verify: several splits, the last with one key",
               **PagedCase([700, 1281, 65], q_lens=[5, 4, 5], heads=8, dim=128, block=64).inputs()),
        Sample("verify: head size 256, options",
               **PagedCase([600, 70], q_lens=[5, 3], dim=256, heads=8, block=48).inputs(
                   window=300, softcap=4.0, sinks=_EIGHT_SINKS)),
        Sample("verify: not causal, left padding",
               **PagedCase([600, 70], q_lens=[5, 3], dim=80, heads=6).inputs(
                   causal=False, k_start=tensor([70, 3], torch.int32))),
        Sample("a short shared block", **PagedCase([40, 50], shared=1).inputs(shared_blocks=1)),
        Sample("shared keys read once: none, few, and many of one's own; none of the shared",
               **PagedCase([1200, 1088, 1089, 1700, 0], dim=128, block=64, heads=8, shared=17)
               .inputs(shared_blocks=17)),
        Sample("shared keys read once: several queries, sinks, softcap, left padding",
               **PagedCase([700, 513, 516, 520], q_lens=[5, 1, 4, 7], heads=8, shared=32).inputs(
                   shared_blocks=32, sinks=_EIGHT_SINKS, softcap=4.0,
                   k_start=tensor([0, 40, 3, 514], torch.int32))),
        Sample("shared keys read once: a sequence that ends among them",
               **PagedCase([700, 100, 512], q_lens=[2, 3, 1], dim=112, heads=6, block=128, shared=4)
               .inputs(shared_blocks=4)),
        Sample("a chunk before keys of several segments, beside decode and a prompt's beginning",
               **PagedCase([2300, 700, 60], q_lens=[48, 1, 60], dim=128).inputs()),
        Sample("segments that a window hides from some rows, sinks, softcap",
               **PagedCase([2500], q_lens=[150], heads=8, dim=64, block=64).inputs(
                   window=700, softcap=4.0, sinks=_EIGHT_SINKS)),
        Sample("segments, not causal, left padding",
               **PagedCase([2100, 2100], q_lens=[17, 40], dim=80, heads=6).inputs(
                   causal=False, k_start=tensor([1100, 3], torch.int32))),
    ],
    errors=[
        Error(r"q: expected one row a sequence where cu_q is none, 2, got 3",
              **PagedCase([5, 6]).inputs() | {"q": normal(3, 4, 64)}),
        Error(r"block_tables: expected shape \[2, .*\], got \[1, 1\]",
              **PagedCase([5, 6]).inputs() | {"block_tables": tensor([[1]], torch.int32)}),
        Error(r"k_scale: expected a tensor beside a cache of float8_e4m3fn, got none",
              **PagedCase([5], kv=_FP8).inputs() | {"k_scale": None}),
        Error(r"v_scale: expected none beside a cache of float32, got a tensor",
              **PagedCase([5]).inputs() | {"v_scale": full((4, 16, 2), 1.0, torch.bfloat16)}),
        Error(r"block size that is a multiple of 16 from 16 to 256, got 24",
              **PagedCase([5], block=24).inputs()),
        Error(r"k_cache: expected dtype float16 or float8_e4m3fn or int8, got bfloat16",
              dtype=torch.float16, **PagedCase([5], kv=torch.bfloat16).inputs()),
        Error(r"plan: expected None, got int", **PagedCase([5]).inputs() | {"plan": 3}),
        Error(r"q: expected dtype float8_e4m3fn, got float32",
              **PagedCase([5]).inputs() | {"q_scale": full((1, 4), 1.0)}),
        Error(r"q_scale: expected shape \[1, 4\], got \[1\]",
              **PagedCase([5], kv=_FP8).fp8_queries() | {"q_scale": full((1,), 1.0)}),
        Error(r"k_cache: expected dtype bfloat16 or float8_e4m3fn or int8, got float32",
              **PagedCase([5]).fp8_queries()),
        Error(r"max_q: expected None or at least 1, got 0",
              **PagedCase([5], q_lens=[1]).inputs() | {"max_q": 0}),
        Error(r"shared_blocks: expected 0 to 1, got 2",
              **PagedCase([5]).inputs() | {"shared_blocks": 2}),
    ],
)  # fmt: skip


def _halves(*shape: int, empty: str = "") -> dict[str, Any]:
    """Two sides; those named in `empty` have lse -inf and NaN in out at the first row."""
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    found: dict[str, Any] = {}
    for side in "ab":
        found[f"out_{side}"] = normal(*shape)
        found[f"lse_{side}"] = normal(*lse_shape, scale=3, dtype=torch.float32)
        if side in empty:
            row = (0,) * (len(shape) - 3) + (0,)
            found[f"out_{side}"] = found[f"out_{side}"].set(row, math.nan)
            found[f"lse_{side}"] = found[f"lse_{side}"].set((..., 0), -math.inf)
            if len(shape) == 4:
                found[f"out_{side}"] = found[f"out_{side}"].set((slice(None), 0), math.nan)
    return found


MERGE = OpCase(
    name="merge_attention",
    op=ridgeline.ops.merge_attention,
    reference=reference.merge_attention,
    competitor=reference.merge_attention,
    samples=[
        Sample("packed rows", **_halves(5, 4, 64)),
        Sample("a batch", **_halves(2, 5, 3, 40)),
        Sample("the left side is empty", **_halves(5, 4, 64, empty="a")),
        Sample("the right side is empty", **_halves(2, 5, 4, 64, empty="b")),
        Sample("both sides are empty: zeros and -inf", **_halves(2, 5, 4, 64, empty="ab")),
        Sample("no rows", **_halves(0, 4, 64)),
    ],
    errors=[
        Error(r"lse_b: expected shape \[4, 5\], got \[5, 4\]",
              **_halves(5, 4, 64) | {"lse_b": normal(5, 4, dtype=torch.float32)}),
        Error(r"out_b: expected the shape of out_a",
              **_halves(5, 4, 64) | {"out_b": normal(5, 4, 8)}),
        Error(r"lse_a: expected dtype float32, got float16",
              **_halves(5, 4, 64) | {"lse_a": normal(4, 5, dtype=torch.float16)}),
    ],
)  # fmt: skip

CASES = [ATTENTION, VARLEN, PAGED, MERGE]
