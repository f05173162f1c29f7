"""Rows of the embedding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import ridgeline
from op_table import Error, Lazy, OpCase, Sample, integers, normal, tensor


def _embed(
    ids: Tensor,
    weight: Tensor,
    last_tokens: Tensor | None = None,
    scale: float = 1.0,
    positions: Tensor | None = None,
    position_weight: Tensor | None = None,
    inputs_ready: bool = False,
) -> Tensor:
    if last_tokens is not None:
        ids = torch.where(ids < 0, last_tokens[(-1 - ids).clamp(min=0).long()], ids)
    out = weight[ids.long()]
    if scale != 1.0:
        out = out * scale
    if positions is not None and position_weight is not None:
        out = out + position_weight[positions.long()]
    return out


def _int32(values: list[Any]) -> Lazy:
    return tensor(values, torch.int32)


_GOOD = {"ids": _int32([3, 0, 4]), "weight": normal(5, 16)}
_PLACED = {"positions": _int32([0, 7, 7]), "position_weight": normal(8, 16)}

EMBED = OpCase(
    name="embed",
    op=ridgeline.ops.embed,
    reference=_embed,
    competitor=_embed,
    samples=[
        Sample("rows in any order", **_GOOD),
        Sample(
            "more than one block a row, the last one not full; 64-bit ids, a row twice",
            ids=tensor([2, 2, 0], torch.int64),
            weight=normal(3, 1032),
        ),
        Sample(
            "ids of the step before beside known ones, the last of them too",
            **_GOOD | {"ids": _int32([-1, 2, -4, -3])},
            last_tokens=_int32([4, 1, 0, 3]),
        ),
        Sample("inputs that nothing writes any more", **_GOOD, inputs_ready=True),
        Sample("a scale, as Gemma's", **_GOOD, scale=math.sqrt(16.0) + 0.125),
        Sample(
            "a scale and positions; 64-bit",
            ids=tensor([-1, 1], torch.int64),
            weight=normal(2, 40),
            last_tokens=_int32([1]),
            scale=0.3,
            positions=tensor([2, 0], torch.int64),
            position_weight=normal(3, 40),
        ),
        Sample("positions alone", **_GOOD, **_PLACED),
        Sample(
            "rows of no whole 16-byte pieces, positions too",
            ids=_int32([1, 0]),
            weight=normal(2, 131),
            positions=_int32([1, 1]),
            position_weight=normal(2, 131),
        ),
        Sample("columns of a wider table", **_GOOD | {"weight": normal(5, 48)[:, 16:32]}),
        Sample(
            "whole pieces at addresses of no 16 bytes", **_GOOD | {"weight": normal(5, 24)[:, 1:17]}
        ),
        Sample("a table of int32, as block tables", **_GOOD | {"weight": integers(-9, 9, 5, 12)}),
        Sample(
            "NaN and infinities pass",
            **_GOOD | {"weight": normal(5, 16).set((3, 2), math.nan).set((0, 5), math.inf)},
        ),
        Sample("no tokens", **_GOOD | {"ids": _int32([])}),
        Sample("no tokens of an empty table", ids=_int32([]), weight=normal(0, 16)),
        Sample("rows of nothing", **_GOOD | {"weight": normal(5, 0)}),
    ],
    errors=[
        Error(r"weight: expected 2 dimensions, got shape \[5\]", **_GOOD | {"weight": normal(5)}),
        Error(
            r"weight: expected dtype float32 or .*, got int64",
            **_GOOD | {"weight": integers(0, 9, 5, 16, dtype=torch.int64)},
        ),
        Error(
            r"weight: expected the last dimension contiguous",
            **_GOOD | {"weight": normal(16, 5).t()},
        ),
        Error(
            r"weight: expected at least one row, got shape \[0, 16\]",
            **_GOOD | {"weight": normal(0, 16)},
        ),
        Error(r"ids: expected dtype int32 or int64, got", **_GOOD | {"ids": normal(3)}),
        Error(r"ids: expected 1 dimensions", **_GOOD | {"ids": _int32([[3, 0, 4]])}),
        Error(r"ids: expected a contiguous tensor", **_GOOD | {"ids": integers(0, 5, 3, 2)[:, 0]}),
        Error(
            r"last_tokens: expected dtype int32, got int64",
            **_GOOD,
            last_tokens=tensor([1], torch.int64),
        ),
        Error(
            r"expected both or neither, got only positions",
            **_GOOD,
            positions=_int32([0, 1, 2]),
        ),
        Error(
            r"expected both or neither, got only position_weight",
            **_GOOD,
            position_weight=normal(8, 16),
        ),
        Error(
            r"positions: expected shape \[3\], got \[2\]",
            **_GOOD | _PLACED | {"positions": _int32([0, 1])},
        ),
        Error(
            r"positions: expected dtype int32, got int64",
            **_GOOD | _PLACED | {"positions": tensor([0, 1, 2], torch.int64)},
        ),
        Error(
            r"position_weight: expected shape \[-1, 16\], got \[8, 8\]",
            **_GOOD | _PLACED | {"position_weight": normal(8, 8)},
        ),
        Error(
            r"weight: expected a floating dtype beside a scale or positions, got int32",
            **_GOOD | {"weight": integers(0, 9, 5, 16)},
            scale=2.0,
        ),
    ],
)

CASES = [EMBED]
