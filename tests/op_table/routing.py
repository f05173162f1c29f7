"""Rows of the choice of experts and of the sum of what they make of a token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import ridgeline
from op_table import Error, OpCase, Sample, full, integers, normal, tensor, uniform


def _route(logits: Tensor, per_token: int, normalized: bool = True) -> tuple[Tensor, ...]:
    """By sorting, which keeps equal ones in order, as torch.topk does not."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top, experts = (t[:, :per_token] for t in wide.sort(dim=-1, descending=True, stable=True))
    weights = top.softmax(-1) if normalized else wide.softmax(-1).gather(-1, experts)
    return weights, *_order(experts, logits.shape[1])


def _order(chosen: Tensor, experts: int) -> tuple[Tensor, ...]:
    outside = (chosen < 0) | (chosen >= experts)
    flat = chosen.masked_fill(outside, experts).flatten()
    order = flat.argsort(stable=True)
    bounds = torch.arange(experts + 1, dtype=flat.dtype, device=chosen.device)
    offsets = torch.searchsorted(flat[order], bounds, out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=chosen.device)
    rows = order // max(chosen.shape[1], 1)
    return offsets, rows.int(), places.int().view(chosen.shape)


def _combine(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    rows = x[places.long()].to(torch.promote_types(x.dtype, torch.float32))
    return (rows * weights.unsqueeze(-1)).sum(1).to(x.dtype)


SPECIAL = tensor(
    [
        [1.0, math.nan, math.inf, math.nan, -math.inf, 2.0],
        [-math.inf, -math.inf, -math.inf, -math.inf, -math.inf, -math.inf],
        [-0.0, 0.0, -1.0, 0.0, -0.0, 0.0],
        [3.0, -math.inf, 3.0, 1.0, -math.inf, 3.0],
        [0.5, 1.5, -2.0, 0.25, 1.0, -0.5],
    ]
)

ROUTE = OpCase(
    name="route_experts",
    op=ridgeline.ops.route_experts,
    reference=_route,
    competitor=_route,
    samples=[
        Sample("a decode batch", logits=normal(33, 128), per_token=8),
        Sample("weights of the softmax over all", logits=normal(33, 128), per_token=8,
               normalized=False),
        Sample("fewer experts than lanes", logits=normal(40, 8), per_token=2),
        Sample("two logits a lane, some of none", logits=normal(20, 40), per_token=4),
        Sample("eight a lane", logits=normal(20, 200), per_token=6, normalized=False),
        Sample("sixteen a lane", logits=normal(20, 512), per_token=10),
        Sample("as many experts as there may be, and choices", logits=normal(64, 1023),
               per_token=32),
        Sample("the same, of the softmax over all", logits=normal(9, 1023), per_token=32,
               normalized=False),
        Sample("all experts are chosen", logits=normal(16, 6), per_token=6),
        Sample("one expert", logits=normal(5, 1), per_token=1),
        Sample("the lowest of equal experts", logits=full((9, 70), 0.5), per_token=5),
        *(Sample("NaN, infinities, zeros of either sign", logits=SPECIAL, per_token=per_token,
                 normalized=normalized)
          for per_token, normalized in ((3, True), (6, True), (4, False))),
        Sample("far from zero", logits=normal(20, 64, scale=100.0), per_token=4),
        Sample("columns of a wider tensor, off 16 bytes", logits=normal(40, 97)[:, 17:81],
               per_token=6),
        Sample("all tokens choose the same", logits=normal(1, 16)[[0] * 70], per_token=3),
        Sample("no tokens", logits=normal(0, 128), per_token=8),
        # CUDA: up to 64 tokens are one block's, from 65 on two kernels share them out.
        Sample("one token more than a block takes", logits=normal(65, 128), per_token=8),
        Sample("chunks of 16, the last one not full", logits=normal(1000, 32), per_token=4),
        Sample("chunks of 40, most counts a block", logits=normal(5000, 1023), per_token=2,
               normalized=False),
        Sample("chunks of more than a batch", logits=normal(10000, 8), per_token=2),
    ],
    errors=[
        Error(r"logits: expected dtype float32 or .*, got int32",
              logits=integers(0, 9, 2, 8), per_token=1),
        Error(r"logits: expected 2 dimensions, got shape \[8\]", logits=normal(8), per_token=1),
        Error(r"logits: expected the last dimension contiguous", logits=normal(8, 4).t(),
              per_token=1),
        Error(r"logits: expected 1 to 1023 experts, got shape \[2, 0\]", logits=normal(2, 0),
              per_token=1),
        Error(r"logits: expected 1 to 1023 experts, got shape \[2, 1024\]",
              logits=normal(2, 1024), per_token=1),
        Error(r"per_token: expected 1 to 8 of 8 experts, got 0", logits=normal(2, 8), per_token=0),
        Error(r"per_token: expected 1 to 8 of 8 experts, got 9", logits=normal(2, 8), per_token=9),
        Error(r"per_token: expected 1 to 32 of 64 experts, got 33", logits=normal(2, 64),
              per_token=33),
    ],
)  # fmt: skip

LONG = torch.int64

ORDER = OpCase(
    name="order_experts",
    op=ridgeline.ops.order_experts,
    reference=_order,
    bound="exact",
    samples=[
        Sample("a decode batch", chosen=integers(0, 128, 33, 8, dtype=LONG), experts=128),
        Sample("int32", chosen=integers(0, 128, 33, 8), experts=128),
        Sample("some are nobody's, below and above",
               chosen=integers(-3, 20, 40, 4, dtype=LONG), experts=16),
        Sample("all are nobody's", chosen=integers(16, 20, 9, 4), experts=16),
        Sample("far outside, where 32 bits would name an expert",
               chosen=tensor([[2**32 + 1, 1], [-(2**33) + 2, 2**40]], LONG), experts=4),
        Sample("experts are chosen more than once", chosen=integers(0, 3, 20, 32), experts=3),
        Sample("the same one by all", chosen=integers(5, 6, 60, 6), experts=8),
        Sample("more choices than a warp has lanes", chosen=integers(0, 50, 11, 70), experts=50),
        Sample("columns of a wider tensor", chosen=integers(0, 9, 30, 8)[:, 2:7], experts=8),
        Sample("every second token, its choices apart",
               chosen=integers(0, 9, 3, 31, dtype=LONG).t()[::2], experts=8),
        Sample("one row for all tokens", chosen=integers(0, 8, 1, 4)[[0] * 30], experts=8),
        Sample("one expert", chosen=integers(0, 1, 5, 1, dtype=LONG), experts=1),
        Sample("no tokens", chosen=integers(0, 8, 0, 4), experts=8),
        Sample("tokens that choose nothing", chosen=integers(0, 8, 6, 0), experts=8),
        # CUDA: up to 2048 choices are one block's, from 2049 on two kernels share them out.
        Sample("as many choices and experts as a block takes",
               chosen=integers(0, 1024, 64, 32, dtype=LONG), experts=1023),
        Sample("one token more than a block takes", chosen=integers(0, 1024, 65, 32),
               experts=1023),
        Sample("chunks of 16 rounds, the last one not full",
               chosen=integers(-1, 129, 5000, 3, dtype=LONG), experts=128),
        Sample("chunks of more than a batch", chosen=integers(0, 5, 40000, 8), experts=4),
    ],
    errors=[
        Error(r"chosen: expected dtype int32 or int64, got float32",
              chosen=normal(2, 8, dtype=torch.float32), experts=8),
        Error(r"chosen: expected 2 dimensions, got shape \[8\]", chosen=integers(0, 8, 8),
              experts=8),
        Error(r"experts: expected 1 to 1023, got 0", chosen=integers(0, 8, 2, 2), experts=0),
        Error(r"experts: expected 1 to 1023, got 1024", chosen=integers(0, 8, 2, 2), experts=1024),
    ],
)  # fmt: skip

_FLOAT = torch.float32
_GOOD = {
    "x": normal(40, 64),
    "places": integers(0, 40, 10, 4),
    "weights": uniform(10, 4, dtype=_FLOAT),
}

COMBINE = OpCase(
    name="combine_experts",
    op=ridgeline.ops.combine_experts,
    reference=_combine,
    competitor=_combine,
    samples=[
        Sample("four experts a token", **_GOOD),
        Sample("more than a block a row, the last one not full", x=normal(16, 2088),
               places=integers(0, 16, 8, 2), weights=uniform(8, 2, dtype=_FLOAT)),
        Sample("eight, the most that are asked for at once", x=normal(24, 1032),
               places=integers(0, 24, 3, 8), weights=uniform(3, 8, dtype=_FLOAT)),
        Sample("eleven", x=normal(50, 128), places=integers(0, 50, 7, 11),
               weights=normal(7, 11, dtype=_FLOAT)),
        Sample("one, and fewer rows than choices", x=normal(3, 40), places=integers(0, 3, 20, 1),
               weights=uniform(20, 1, dtype=_FLOAT)),
        Sample("rows of no whole 16-byte pieces", **_GOOD | {"x": normal(40, 131)}),
        Sample("rows of a wider tensor", **_GOOD | {"x": normal(40, 96)[:, 16:80]}),
        Sample("whole pieces at addresses of no 16 bytes",
               **_GOOD | {"x": normal(40, 72)[:, 1:65]}),
        Sample("NaN and infinities pass, with a weight of 0 too",
               x=normal(6, 16).set((1, 3), math.nan).set((2, 5), math.inf).set((4, 7), -math.inf),
               places=tensor([[0, 1], [2, 3], [2, 4], [3, 5]], torch.int32),
               weights=tensor([[0.5, 0.5], [0.0, 1.0], [0.5, 0.5], [0.25, 0.75]], _FLOAT)),
        Sample("no experts a token", **_GOOD | {"places": integers(0, 1, 10, 0),
                                                "weights": uniform(10, 0, dtype=_FLOAT)}),
        Sample("no tokens of no rows", x=normal(0, 64), places=integers(0, 1, 0, 4),
               weights=uniform(0, 4, dtype=_FLOAT)),
        Sample("rows of nothing", **_GOOD | {"x": normal(40, 0)}),
    ],
    errors=[
        Error(r"x: expected dtype float32 or .*, got int32",
              **_GOOD | {"x": integers(0, 9, 40, 8)}),
        Error(r"x: expected 2 dimensions, got shape \[40\]", **_GOOD | {"x": normal(40)}),
        Error(r"x: expected the last dimension contiguous", **_GOOD | {"x": normal(64, 40).t()}),
        Error(r"x: expected at least one row, got shape \[0, 64\]", **_GOOD | {"x": normal(0, 64)}),
        Error(r"places: expected dtype int32, got int64",
              **_GOOD | {"places": integers(0, 40, 10, 4, dtype=torch.int64)}),
        Error(r"places: expected 2 dimensions, got shape \[40\]",
              **_GOOD | {"places": integers(0, 40, 40)}),
        Error(r"places: expected a contiguous tensor",
              **_GOOD | {"places": integers(0, 40, 4, 10).t()}),
        Error(r"weights: expected dtype float32, got bfloat16",
              **_GOOD | {"weights": uniform(10, 4, dtype=torch.bfloat16)}),
        Error(r"weights: expected the shape of places, \[10, 4\], got \[10, 3\]",
              **_GOOD | {"weights": uniform(10, 3, dtype=_FLOAT)}),
    ],
)  # fmt: skip

CASES = [ROUTE, ORDER, COMBINE]
