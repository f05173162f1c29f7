"""Rows of the products with the weights of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import ridgeline
from op_table import Error, Lazy, OpCase, Sample, normal, tensor
from op_table.gemm import HALVES, linear


def _grouped(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Expert by expert in plain torch."""
    x = x if rows is None else x[rows.long()]
    parts = []
    for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
        parts.append(linear(x[begin:end], weight[e], None if bias is None else bias[e], activation))
    out = torch.cat(parts)
    return torch.cat((out, out.new_zeros(len(x) - len(out), out.shape[1])))


def at(*offsets: int) -> Lazy:
    return tensor(list(offsets), torch.int32)


def indices(values: Sequence[int]) -> Lazy:
    return tensor(list(values), torch.int32)


MIXED = [(7 * i + i // 5) % 40 for i in range(150)]

GROUPED = OpCase(
    name="grouped_linear",
    op=ridgeline.ops.grouped_linear,
    reference=_grouped,
    competitor=_grouped,
    dtypes=HALVES,
    samples=[
        Sample("gathered rows, gated, biases", x=normal(40, 128), weight=normal(3, 96, 128),
               offsets=at(0, 70, 71, 150), rows=indices(MIXED), bias=normal(3, 96),
               activation="silu_mul"),
        Sample("a row each", x=normal(4, 64), weight=normal(4, 128, 64), offsets=at(0, 1, 2, 3, 4)),
        Sample("experts without rows: first, between, last", x=normal(5, 64),
               weight=normal(5, 40, 64), offsets=at(0, 0, 2, 2, 5, 5)),
        Sample("one expert has all", x=normal(33, 72), weight=normal(8, 136, 72),
               offsets=at(0, 0, 0, 33, 33, 33, 33, 33, 33)),
        Sample("rows of no expert are zero", x=normal(40, 64), weight=normal(2, 48, 64),
               offsets=at(0, 3, 6)),
        Sample("no expert has a row", x=normal(3, 64), weight=normal(2, 48, 64),
               offsets=at(0, 0, 0)),
        Sample("tiles of 64 rows, odd tails", x=normal(131, 264), weight=normal(3, 200, 264),
               offsets=at(0, 63, 128, 131)),
        Sample("tiles of 128 rows", x=normal(300, 128), weight=normal(2, 144, 128),
               offsets=at(0, 129, 300), activation="gelu"),
        Sample("many experts", x=normal(150, 64), weight=normal(130, 32, 64),
               offsets=at(*(min(150, i * 3 // 2) for i in range(131)))),
        Sample("no rows", x=normal(0, 64), weight=normal(2, 32, 64), offsets=at(0, 0, 0)),
        Sample("strided", x=normal(6, 128)[:, 64:], weight=normal(2, 64, 128)[:, ::2, :64],
               offsets=at(0, 2, 6)),
        Sample("NaN stays in its row", x=normal(6, 64).set((1, 3), float("nan")),
               weight=normal(2, 32, 64), offsets=at(0, 2, 6)),
    ],
    errors=[
        Error(r"x.*64.*\[2, 32\]", x=normal(2, 32), weight=normal(2, 8, 64),
              offsets=at(0, 1, 2)),
        Error(r"weight.*3 dimensions.*\[8, 64\]", x=normal(2, 64), weight=normal(8, 64),
              offsets=at(0, 1, 2)),
        Error(r"offsets.*\[3\].*\[2\]", x=normal(2, 64), weight=normal(2, 8, 64), offsets=at(0, 2)),
        Error(r"offsets.*int32.*int64", x=normal(2, 64), weight=normal(2, 8, 64),
              offsets=tensor([0, 1, 2], torch.int64)),
        Error(r"bias.*\[2, 8\].*\[8\]", x=normal(2, 64), weight=normal(2, 8, 64),
              offsets=at(0, 1, 2), bias=normal(8)),
        Error(r"weight.*even.*silu_mul.*9", x=normal(2, 64), weight=normal(2, 9, 64),
              offsets=at(0, 1, 2), activation="silu_mul"),
    ],
)  # fmt: skip

CASES = [GROUPED]
