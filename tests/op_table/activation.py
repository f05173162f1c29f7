"""Rows of the elementwise activations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import ridgeline
from op_table import Error, Lazy, OpCase, Sample, normal, tensor

F = torch.nn.functional

# Both tails, the limits and what has no value: gelu(-inf) and silu(-inf) are NaN, as in torch.
EXTREMES = [0.0, -0.0, 1e-3, -1e-3, 4.0, -4.0, 9.0, -9.0, 80.0, -80.0, 1e4, -1e4]
EXTREMES += [math.inf, -math.inf, math.nan, 1.0]


def _bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def _silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _gelu_mul(x: Tensor, approximate: str = "none") -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def _swiglu_clamped(x: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


def wider(rows: int, cols: int, stride: int, start: int) -> Lazy:
    """[rows, cols] at `stride` elements a row, beginning `start` elements into its storage."""
    flat = normal(start + rows * stride)
    return Lazy(lambda context: flat(context)[start:].view(rows, stride)[:, :cols])


def gated_samples() -> list[Sample]:
    return [
        Sample("a decode batch that is no power of two", x=normal(33, 512)),
        Sample("the smallest row: one 16-byte piece of each half", x=normal(1, 16)),
        Sample("one element", x=normal(1, 2)),
        Sample("no rows", x=normal(0, 64)),
        Sample("no columns", x=normal(3, 0)),
        Sample("three dimensions", x=normal(2, 3, 48)),
        Sample("halves of no whole number of pieces", x=normal(5, 2 * 13)),
        Sample("rows of a wider tensor", x=wider(7, 64, 128, 0)),
        Sample("rows off 16 bytes", x=wider(4, 64, 64, 1)),
        Sample("a row over several blocks", x=normal(1, 2 * 5000)),
        Sample("rows enough for four a thread, the last ones missing", x=normal(1027, 2 * 2120)),
        Sample("extremes of the gate", x=tensor([[*EXTREMES, *[1.0] * len(EXTREMES)]])),
    ]


ODD = Error(r"x: expected an even last dimension.*\[2, 7\]", x=normal(2, 7))

CASES = [
    OpCase(
        name="bias_gelu",
        op=ridgeline.ops.bias_gelu,
        reference=_bias_gelu,
        competitor=_bias_gelu,
        samples=[
            Sample("a decode batch that is no power of two", x=normal(33, 256), bias=normal(256)),
            Sample("the smallest row: one 16-byte piece", x=normal(1, 8), bias=normal(8)),
            Sample("one element", x=normal(1, 1), bias=normal(1)),
            Sample("no rows", x=normal(0, 64), bias=normal(64)),
            Sample("no columns", x=normal(3, 0), bias=normal(0)),
            Sample("a length of no whole number of pieces", x=normal(5, 259), bias=normal(259)),
            Sample("rows of a wider tensor", x=wider(7, 64, 128, 0), bias=normal(64)),
            Sample("rows off 16 bytes", x=wider(4, 64, 64, 1), bias=normal(64)),
            Sample("a bias off 16 bytes", x=normal(4, 64), bias=normal(65)[1:]),
            Sample("a row over several blocks", x=normal(1, 5000), bias=normal(5000)),
            Sample("four rows a thread, the last missing", x=normal(1027, 2120), bias=normal(2120)),
            Sample(
                "the tanh form", x=normal(9, 96, scale=3.0), bias=normal(96), approximate="tanh"
            ),
            Sample("extremes", x=tensor([EXTREMES]), bias=tensor([0.0] * len(EXTREMES))),
            Sample(
                "extremes of the tanh form",
                x=tensor([EXTREMES]),
                bias=tensor([0.0] * len(EXTREMES)),
                approximate="tanh",
            ),
        ],
        errors=[
            Error(r"bias.*\[16\].*\[8\]", x=normal(2, 16), bias=normal(8)),
            Error(
                r"bias.*bfloat16, got float32",
                x=normal(2, 16),
                bias=normal(16, dtype=torch.float32),
                dtype=torch.bfloat16,
            ),
            Error(r"x.*float32 or.*got int32", x=normal(2, 8).to(torch.int32), bias=normal(8)),
            Error(r"approximate.*got 'erf'", x=normal(2, 8), bias=normal(8), approximate="erf"),
        ],
    ),
    OpCase(
        name="silu_mul",
        op=ridgeline.ops.silu_mul,
        reference=_silu_mul,
        competitor=_silu_mul,
        samples=gated_samples(),
        errors=[
            ODD,
            Error(r"x.*float32 or.*got int32", x=normal(2, 8).to(torch.int32)),
            Error(r"x.*last dimension contiguous", x=normal(16, 16).t()),
        ],
    ),
    OpCase(
        name="gelu_mul",
        op=ridgeline.ops.gelu_mul,
        reference=_gelu_mul,
        competitor=_gelu_mul,
        samples=[
            *gated_samples(),
            Sample("the tanh form", x=normal(9, 96, scale=3.0), approximate="tanh"),
        ],
        errors=[ODD, Error(r"approximate.*got ''", x=normal(2, 8), approximate="")],
    ),
    OpCase(
        name="swiglu_clamped",
        op=ridgeline.ops.swiglu_clamped,
        reference=_swiglu_clamped,
        competitor=_swiglu_clamped,
        samples=[
            *gated_samples(),
            Sample("both clamped here and there", x=normal(9, 96, scale=8.0)),
            Sample("another limit", x=normal(9, 96, scale=8.0), limit=2.5),
            Sample("nothing clamped", x=normal(9, 96, scale=8.0), limit=math.inf),
            Sample("another alpha", x=normal(9, 96, scale=3.0), alpha=-1.0),
            Sample("half of the gate", x=normal(9, 96), alpha=0.0),
            Sample("extremes of up", x=tensor([[*[1.0] * len(EXTREMES), *EXTREMES]])),
            Sample(
                "infinities that stay", x=tensor([[math.inf, 1.0, 1.0, -math.inf]]), limit=math.inf
            ),
        ],
        errors=[
            ODD,
            Error(r"x.*float32 or.*got int32", x=normal(2, 8).to(torch.int32)),
            Error(r"x.*last dimension contiguous", x=normal(16, 16).t()),
            *(
                Error(f"limit: .*positive.*got {value:g}", x=normal(2, 8), limit=value)
                for value in (0.0, -7.0, math.nan)
            ),
            *(
                Error(f"alpha: .*finite.*got {value:g}", x=normal(2, 8), alpha=value)
                for value in (math.inf, math.nan)
            ),
            Error(r"alpha: .*finite float32.*1e\+39", x=normal(2, 8), alpha=1e39),
        ],
    ),
]
