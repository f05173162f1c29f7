"""Rows of the reductions and of softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import ridgeline
from op_table import Error, Lazy, OpCase, Sample, normal, tensor


def _reduce(x: Tensor, op: str) -> Tensor:
    match op:
        case "sum":
            return x.sum(-1)
        case "mean":
            return x.mean(-1)
        case "max":
            return x.amax(-1)
        case "min":
            return x.amin(-1)
        case "argmax":
            return _first_largest(x)
    return torch.logsumexp(x, -1)


def _first_largest(x: Tensor) -> Tensor:
    """argmax with the ties that torch leaves open: the first NaN, else the first maximum."""
    largest = x.amax(-1, keepdim=True)
    hits = (x == largest) | (x.isnan() & largest.isnan())
    return hits.to(torch.int8).argmax(-1)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def wider(rows: int, cols: int, stride: int, start: int) -> Lazy:
    """[rows, cols] at `stride` elements a row, beginning `start` elements into its storage."""
    flat = normal(start + rows * stride)
    return Lazy(lambda context: flat(context)[start:].view(rows, stride)[:, :cols])


ROWS = {
    "a decode batch that is no power of two": normal(33, 256),
    "one element": normal(1, 1),
    "no rows": normal(0, 64),
    "three dimensions": normal(2, 3, 72),
    "a length of no whole number of pieces": normal(5, 259),
    "rows that begin off a line of 128 bytes": normal(5, 1032),
    "rows of a wider tensor": wider(7, 64, 128, 0),
    "rows off 16 bytes": wider(4, 64, 64, 1),
    "one dimension: a single row": normal(100),
    "eight pieces a thread": normal(2, 16384),
    "beyond the registers: read again": normal(1, 33000 + 8),
    "beyond the registers, element by element": normal(1, 33001),
    "NaN in one row": normal(3, 64).set((1, 5), math.nan),
    "+inf in one row": normal(3, 64).set((1, 5), math.inf),
    "-inf in one row": normal(3, 64).set((1, 5), -math.inf),
    "-inf alone": normal(2, 64).set((1,), -math.inf),
}
TIES = tensor([[1.0, 3.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0], [-1.0, math.nan, 5.0, math.nan]])
OPS = ("sum", "mean", "max", "min", "argmax", "logsumexp")

CASES = [
    OpCase(
        name="row_reduce",
        op=ridgeline.ops.row_reduce,
        reference=_reduce,
        competitor=_reduce,
        samples=[
            *(Sample(f"{op}: {why}", x=x, op=op) for why, x in ROWS.items() for op in OPS),
            Sample("the first of equals, and the first NaN", x=TIES, op="argmax"),
            *(Sample("no columns", x=normal(3, 0), op=op) for op in ("sum", "mean", "logsumexp")),
            Sample("far from zero", x=normal(3, 64, scale=100.0), op="logsumexp"),
        ],
        errors=[
            Error(r"op: expected 'sum'.*got 'prod'", x=normal(2, 8), op="prod"),
            *(
                Error(r"x.*at least one column.*\[2, 0\]", x=normal(2, 0), op=op)
                for op in ("max", "min", "argmax")
            ),
            Error(r"x.*float32 or.*got int32", x=normal(2, 8).to(torch.int32), op="sum"),
            Error(r"x.*last dimension contiguous", x=normal(16, 16).t(), op="sum"),
        ],
    ),
    OpCase(
        name="softmax",
        op=ridgeline.ops.softmax,
        reference=_softmax,
        competitor=_softmax,
        samples=[
            *(Sample(why, x=x) for why, x in ROWS.items()),
            Sample("no columns", x=normal(3, 0)),
            Sample("far from zero", x=normal(3, 64, scale=100.0)),
        ],
        errors=[
            Error(r"x.*float32 or.*got int32", x=normal(2, 8).to(torch.int32)),
            Error(r"x.*last dimension contiguous", x=normal(16, 16).t()),
        ],
    ),
]
