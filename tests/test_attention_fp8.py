"""Paged attention of fp8 queries over an fp8 cache, against float64 on the dequantised values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_reference import visible
from ridgeline import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HEADS, KV_HEADS = 4, 2
GROUP = HEADS // KV_HEADS
E4M3 = torch.float8_e4m3fn


class Batch:
    """Sequences in an fp8 cache whose other slots hold NaN; values' scales lie up to 2^12 apart."""

    def __init__(self, lengths: list[int], q_lens: list[int], block: int, dim: int) -> None:
        draw = torch.Generator().manual_seed(dim + block)
        counts = [-(-n // block) for n in lengths]
        shape = (sum(counts) + 1, block, KV_HEADS, dim)
        self.lengths, self.dim = lengths, dim
        self.k, self.v = (torch.randn(shape, generator=draw).mul(60).to(E4M3) for _ in range(2))
        self.k_scale = torch.rand(shape[:3], generator=draw).mul(0.02).bfloat16()
        self.v_scale = (torch.rand(shape[:3], generator=draw) * 12 - 6).exp2().bfloat16()
        self.v_scale[1, 3] = 0.0  # of a vector of zeros
        self.ids = torch.arange(1, shape[0]).split(counts)
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, mine, length in zip(self.tables, self.ids, lengths):
            row[: len(mine)] = mine.int()
            for cache in (self.k, self.v, self.k_scale, self.v_scale):
                cache[mine[-1], (length - 1) % block + 1 :] = math.nan
        for cache in (self.k, self.v, self.k_scale, self.v_scale):
            cache[0] = math.nan
        self.cu_q = [0, *torch.tensor(q_lens).cumsum(0).tolist()]
        self.q = torch.randn((self.cu_q[-1], HEADS, dim), generator=draw).mul(60).to(E4M3)
        self.q_scale = torch.rand(self.q.shape[:2], generator=draw) * 0.03
        self.q_scale[5] = 0.0

    def run(self, device: str, **options: Any) -> tuple[Tensor, Tensor]:
        names = ("q", "k", "v", "tables", "q_scale", "k_scale", "v_scale")
        q, k, v, tables, *scales = (getattr(self, name).to(device) for name in names)
        lengths, cu_q = (
            torch.tensor(n, dtype=torch.int32, device=device) for n in (self.lengths, self.cu_q)
        )
        longest = max(b - a for a, b in zip(self.cu_q, self.cu_q[1:]))
        found = ops.paged_attention(
            q, k, v, tables, lengths, cu_q, q_scale=scales[0], k_scale=scales[1],
            v_scale=scales[2], max_q=longest, return_lse=True, **options,
        )  # fmt: skip
        assert isinstance(found, tuple) and found[0].dtype == torch.bfloat16
        return found[0].double().cpu(), found[1].double().cpu()

    def rows(self, b: int, cache: Tensor) -> Tensor:
        """[heads, keys, ...] of one sequence in float64."""
        mine = cache[self.ids[b]].double().flatten(0, 1)[: self.lengths[b]]
        return mine.repeat_interleave(GROUP, 1).transpose(0, 1)

    def expected(self, b: int, start: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Output, lse, and how far the output may be off."""
        part = slice(self.cu_q[b], self.cu_q[b + 1])
        q = (self.q[part].double() * self.q_scale[part, :, None]).transpose(0, 1)
        k = self.rows(b, self.k) * self.rows(b, self.k_scale)[..., None]
        codes, size = self.rows(b, self.v), self.rows(b, self.v_scale)
        scores = q @ k.transpose(1, 2) / math.sqrt(self.dim)
        if cap := options.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        mask = visible(
            q.shape[1], k.shape[1], options.get("causal", True), options.get("window"), start
        )
        scores = scores.masked_fill(~mask, -math.inf)
        lse = scores.logsumexp(-1)
        weights = torch.where(lse[..., None] == -math.inf, 0, (scores - lse[..., None]).exp())
        products = weights * size[:, None]
        out = products @ codes
        # What paged_attention states of the weights' rounding, and the sums of 14 bits.
        largest = weights.amax(-1, keepdim=True) * size.amax(-1)[:, None, None]
        rounding = torch.maximum(products * 2.0**-4, largest * 2.0**-15) * mask
        bound = rounding @ codes.abs() + 2.0**-6 * products @ codes.abs() + 2.0**-8 * out.abs()
        return out, lse, bound


def check(batch: Batch, found: tuple[Tensor, Tensor], starts: list[int], **options: Any) -> None:
    out, lse = found
    for b, start in enumerate(starts):
        want, want_lse, bound = batch.expected(b, start, **options)
        part = slice(batch.cu_q[b], batch.cu_q[b + 1])
        assert bool(((out[part].transpose(0, 1) - want).abs() <= bound).all()), f"sequence {b}"
        unseen = want_lse == -math.inf
        assert torch.equal(lse[:, part] == -math.inf, unseen)
        assert bool(((lse[:, part] - want_lse)[~unseen].abs() < 0.02).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [16, 48, 64])  # copies of a tile of keys: eight, eight and two
@pytest.mark.parametrize("dim", [128, 80, 16])  # the fp8 tile, and heads that the copies pad
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"window": 200}, {"softcap": 5.0}, {"k_start": [37, 0, 0, 500, 2]}],
    ids=["causal", "full", "window", "softcap", "padding"],
)
def test_within_its_bound(device: str, block: int, dim: int, options: dict[str, Any]) -> None:
    """Tiles and their edges beside sequences of one query, which have a kernel of their own."""
    batch = Batch([300, 129, 1, 600, 60], [300, 1, 1, 140, 90], block, dim)
    starts = options.get("k_start", [0] * 5)
    given = dict(options)
    if "k_start" in given:
        given["k_start"] = torch.tensor(starts, dtype=torch.int32, device=device)
    check(batch, batch.run(device, **given), starts, **options)


@pytest.mark.sanitize
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 150])
def test_tiles_of_few_rows(device: str, window: int | None) -> None:
    """Of a tile of 192 queries only some 64 have rows, or see the last keys: the others pass over
    one tile of keys, or all but one of up to eleven, in works one after the other."""
    batch = Batch([1000, 900, 1400, 257, 193], [65, 193, 20, 257, 193], 64, 128)
    check(batch, batch.run(device, window=window), [0] * 5, window=window)


@pytest.mark.parametrize("device", DEVICES)
def test_long_sums_keep_their_size(device: str) -> None:
    """The tensor cores truncate sums of e4m3, so that one sum of 4000 values of one sign comes out
    5% too small; sums of 128 are added in fp32."""
    batch = Batch([4000], [20], 64, 128)
    batch.v = batch.v.float().abs().to(E4M3)
    batch.v_scale = torch.where(batch.v_scale.isnan(), batch.v_scale, 1.0).bfloat16()
    out, _ = batch.run(device)
    want = batch.expected(0, 0)[0].transpose(0, 1)
    assert abs(float(out.sum() / want.sum()) - 1) < 0.005


@pytest.mark.parametrize("device", DEVICES)
def test_a_sequence_alone_has_the_same_bits(device: str) -> None:
    batch = Batch([300, 600], [300, 140], 64, 128)
    out, lse = batch.run(device)
    batch.cu_q, batch.lengths, batch.tables = [0, 300], [300], batch.tables[:1]
    batch.q, batch.q_scale = batch.q[:300], batch.q_scale[:300]
    alone, alone_lse = batch.run(device)
    assert torch.equal(out[:300], alone) and torch.equal(lse[:, :300], alone_lse)
