"""Rows of quantising to fp8: the codes times their scales stand for the values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import ridgeline
from op_table import Error, Lazy, OpCase, Sample, normal

EXTENT = 128
GROUPS = {"group": EXTENT, "group256": 256}  # columns


def spread(scale: Tensor, x: Tensor, granularity: str) -> Tensor:
    """The scale of each element of x."""
    if granularity in ("tensor", "row"):
        return scale.expand(x.shape)
    scale = scale.repeat_interleave(GROUPS.get(granularity, EXTENT), -1)[..., : x.shape[-1]]
    if granularity == "block":
        scale = scale.repeat_interleave(EXTENT, 0)[: x.shape[0]]
    return scale


def _dequantised(x: Tensor, granularity: str = "row") -> tuple[Tensor, Tensor]:
    q, scale = ridgeline.ops.quantize_fp8(x, granularity)
    return q.float() * spread(scale, x, granularity), scale


def _amax(x: Tensor, granularity: str) -> Tensor:
    magnitude = x.abs()
    if granularity == "tensor":
        return magnitude.amax().reshape(1) if x.numel() else x.new_zeros(1)
    if granularity == "row":
        return magnitude.amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
    extent = GROUPS.get(granularity, EXTENT)
    pieces = [piece.amax(-1) for piece in magnitude.split(extent, -1) if piece.shape[-1]]
    groups = torch.stack(pieces, -1) if pieces else x.new_zeros(*x.shape[:-1], 0)
    if granularity in GROUPS:
        return groups
    blocks = [rows.amax(0) for rows in groups.split(EXTENT, 0) if rows.shape[0]]
    return torch.stack(blocks) if blocks else x.new_zeros(0, groups.shape[-1])


def _reference(x: Tensor, granularity: str = "row") -> tuple[Tensor, Tensor]:
    """The values themselves; where the scale is not finite, nothing is left of them."""
    amax = _amax(x, granularity)
    scale = torch.where(amax == 0, 1.0, amax / 448)
    each = spread(scale, x, granularity)
    return torch.where(torch.isfinite(each), x, math.nan), scale


def _half_a_code(expected: Tensor) -> Tensor:
    """e4m3 keeps 4 significant bits: half a step is 2^-4 of the value, or among the subnormal codes
    2^-10 of the scale, which is the largest value / 448. A scale itself is well within that.
    """
    finite = torch.where(torch.isfinite(expected), expected.abs(), 0.0)
    largest = finite.max() if finite.numel() else torch.zeros(())
    return finite * 2**-4 * (1 + 2**-10) + largest / 448 * 2**-10 * (1 + 2**-10)


def wider(rows: int, cols: int, stride: int, start: int) -> Lazy:
    """[rows, cols] at `stride` elements a row, beginning `start` elements into its storage."""
    flat = normal(start + rows * stride)
    return Lazy(lambda context: flat(context)[start:].view(rows, stride)[:, :cols])


MATRICES = {
    "a decode batch that is no power of two": normal(33, 256),
    "blocks and groups narrower at the edges": normal(130, 200),
    "a length of no whole number of pieces": normal(5, 259),
    "one element": normal(1, 1),
    "no rows": normal(0, 64),
    "no columns": normal(3, 0),
    "rows of a wider tensor": wider(7, 64, 192, 0),
    "rows off 16 bytes": wider(4, 64, 64, 1),
    "a row of zeros": normal(3, 128).set((1,), 0.0),
    "all zeros": normal(2, 128, scale=0.0),
    "NaN in one row": normal(3, 256).set((1, 5), math.nan),
    "infinity in one row": normal(3, 256).set((1, 200), -math.inf),
    "eight pieces a thread": normal(2, 16384),
    "eight clusters, of float32 two passes": normal(40, 4096),
    "sixteen clusters": normal(130, 4096),
    "the same in rows of a wider tensor": wider(130, 4096, 4160, 0),
}


def _dequantised_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = ridgeline.ops.quantize_int8(x)
    return q.float() * scale, scale


def _reference_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    amax = _amax(x, "row")
    scale = torch.where(amax == 0, 1.0, amax / 127)
    return torch.where(torch.isfinite(scale), x, math.nan), scale


def _half_an_integer(expected: Tensor) -> Tensor:
    """Half a code of the largest row: the codes of 127 steps."""
    finite = torch.where(torch.isfinite(expected), expected.abs(), 0.0)
    largest = finite.max() if finite.numel() else torch.zeros(())
    return largest / 127 * 0.5 * (1 + 2**-10) + torch.zeros_like(expected)


TENSOR = {"granularity": "tensor"}
CASES = [
    OpCase(
        name="quantize_int8",
        op=_dequantised_int8,
        reference=_reference_int8,
        bound=_half_an_integer,
        samples=[
            *(Sample(why, x=x) for why, x in MATRICES.items()),
            Sample("three dimensions", x=normal(2, 3, 72)),
            Sample("beyond the registers", x=normal(1, 33000)),
        ],
        errors=[
            Error(r"x.*float32 or.*got int32", x=normal(2, 8).to(torch.int32)),
            Error(r"x.*last dimension contiguous", x=normal(16, 16).t()),
        ],
    ),
    OpCase(
        name="quantize_fp8",
        op=_dequantised,
        reference=_reference,
        bound=_half_a_code,
        samples=[
            *(
                Sample(f"{granularity}: {why}", x=x, granularity=granularity)
                for why, x in MATRICES.items()
                for granularity in ("row", "tensor", "group", "group256", "block")
            ),
            Sample("three dimensions, by row", x=normal(2, 3, 72)),
            Sample("three dimensions, by group", x=normal(2, 3, 272), granularity="group"),
            Sample("three dimensions, one scale", x=normal(2, 3, 72), granularity="tensor"),
            Sample("beyond the registers", x=normal(1, 33000)),
            Sample("NaN in the last cluster", x=normal(64, 8192).set((63, -1), math.nan), **TENSOR),
            Sample("infinity in one", x=normal(64, 8192).set((9, 5), math.inf), **TENSOR),
            Sample("beyond the registers of all SMs", x=normal(513, 4096), **TENSOR),
        ],
        errors=[
            Error(r"granularity.*'block', got 'column'", x=normal(2, 8), granularity="column"),
            Error(r"x: expected 2 dimensions.*\[2, 3, 8\]", x=normal(2, 3, 8), granularity="block"),
            Error(r"x.*float32 or.*got int32", x=normal(2, 8).to(torch.int32)),
            Error(r"x.*last dimension contiguous", x=normal(16, 16).t()),
        ],
    ),
]
