"""Decode over caches of 8 bits; kernels add a bias to int8 keys and take it from the products."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline import ops
from test_attention import DEVICES

BLOCK, HEADS, KV_HEADS = 64, 32, 8

Pair = tuple[Tensor, Tensor]  # of keys and of values


def dequantised(codes: Tensor, scales: Tensor, ids: Tensor, length: int) -> Tensor:
    """[heads, keys, dim] of one sequence in float64."""
    values = codes[ids.long()].double() * scales[ids.long()].double()[..., None]
    return values.flatten(0, 1)[:length].repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1)


def check(
    found: Any, q: Tensor, codes: Pair, scales: Pair, tables: Tensor, lengths: list[int]
) -> None:
    out, lse = (t.double().cpu() for t in found)
    for b, length in enumerate(lengths):
        keys = dequantised(codes[0], scales[0], tables[b], length)
        values = dequantised(codes[1], scales[1], tables[b], length)
        scores = (keys @ q[b].double()[..., None])[..., 0] / math.sqrt(q.shape[-1])
        expected = scores.logsumexp(-1)
        weights = (scores - expected[:, None]).exp()[:, None]
        assert bool(((lse[:, b] - expected).abs() < 2e-3).all())
        # The output is rounded to bf16, by 2^-8; weights times their values' scales to fp16, what
        # brings those of a warp to the row's base, and the product of both, each by 2^-11 or, far
        # below the row's largest weight, by 2^-25 of it, which add up to 2^-23.
        magnitude = (weights @ values.abs())[:, 0]
        as_largest = dequantised(
            codes[1], scales[1].amax().expand(scales[1].shape), tables[b], length
        )
        small = 2.0**-23 * weights.amax(-1) * as_largest.abs().sum(1)
        error = (out[b] - (weights @ values)[:, 0]).abs()
        assert bool((error <= (2.0**-8 + 3 * 2.0**-11) * magnitude + small).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", [[700], [300, 64, 1, 515]])  # on Hopper a kernel each
def test_queries_of_one_sign(lengths: list[int], dim: int, device: str) -> None:
    """All codes, -128 too, by queries for which the bias weighs as much as it can."""
    draw = torch.Generator().manual_seed(dim)
    width = -(-max(lengths) // BLOCK)
    shape = (len(lengths) * width, BLOCK, KV_HEADS, dim)
    k, v = (torch.randint(-128, 128, shape, generator=draw).to(torch.int8) for _ in range(2))
    k_scale, v_scale = (
        (torch.rand(shape[:3], generator=draw) * 0.02 + 0.01).bfloat16() for _ in range(2)
    )
    tables = torch.randperm(shape[0], generator=draw).int().view(len(lengths), width)
    q = (torch.randn(len(lengths), HEADS, dim, generator=draw).abs() + 4).bfloat16()
    q[:, 1::2] *= -1
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    found = ops.paged_attention(
        *(t.to(device) for t in (q, k, v, tables, seq_lens)),
        k_scale=k_scale.to(device), v_scale=v_scale.to(device), return_lse=True,
    )  # fmt: skip
    check(found, q, (k, v), (k_scale, v_scale), tables, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])  # scaled to fp16; as they are
@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
def test_short_sequences_equal_each_alone(cache: torch.dtype, dtype: torch.dtype) -> None:
    """Leaves of 128 keys: alone each is a block's. Queries of hundreds, and one row of zeros."""
    lengths, width = [512, 300, 160, 129, 128, 64, 1], 512 // BLOCK
    draw = torch.Generator().manual_seed(7)
    shape = (len(lengths) * width, BLOCK, KV_HEADS, 128)
    k, v = (
        (x * 40).round().clamp(-128, 127).to(cache) if cache == torch.int8 else x.to(cache)
        for x in (torch.randn(shape, generator=draw) for _ in range(2))
    )
    unit = 1e-4 if cache == torch.int8 else 4e-3
    k_scale, v_scale = (
        ((torch.rand(shape[:3], generator=draw) + 0.5) * x).bfloat16() for x in (unit, 250 * unit)
    )
    tables = torch.randperm(shape[0], generator=draw).int().view(len(lengths), width)
    q = (torch.randn(len(lengths), HEADS, 128, generator=draw) * 300).to(dtype)
    q[2, 3] = 0
    seq_lens = torch.tensor(lengths, dtype=torch.int32)

    def run(some: slice) -> Any:
        return ops.paged_attention(
            *(t.cuda() for t in (q[some], k, v, tables[some], seq_lens[some])),
            k_scale=k_scale.cuda(), v_scale=v_scale.cuda(), return_lse=True,
        )  # fmt: skip

    out, lse = run(slice(None))
    check((out, lse), q, (k, v), (k_scale, v_scale), tables, lengths)
    for b in range(len(lengths)):
        alone = run(slice(b, b + 1))
        assert torch.equal(out[b], alone[0][0]), f"out of sequence {b}"
        assert torch.equal(lse[:, b], alone[1][:, 0]), f"lse of sequence {b}"
