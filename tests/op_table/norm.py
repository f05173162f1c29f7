"""Rows of the norms."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import ridgeline
from op_table import Error, Lazy, OpCase, Sample, normal

F = torch.nn.functional

# Widths in elements of 16 bits: a row is held in registers up to 4096 pieces of 16 bytes.
WIDEST_HELD = 32768
BEYOND_REGISTERS = WIDEST_HELD + 64


def _rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * scale * (weight + offset)


def _torch_rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    weight = (weight + offset).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, **options: Any) -> Any:
    total = residual + x
    return _rmsnorm(total, weight, **options), total


def _torch_add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, **options: Any) -> Any:
    total = residual + x
    return _torch_rmsnorm(total, weight, **options), total


def _layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _torch_layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    bias = None if bias is None else bias.to(x.dtype)
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias, eps)


def _layernorm_gelu(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, approximate: str = "none"
) -> Tensor:
    return F.gelu(_layernorm(x, weight, bias, eps), approximate=approximate)


def _torch_layernorm_gelu(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, approximate: str = "none"
) -> Tensor:
    return F.gelu(_torch_layernorm(x, weight, bias, eps), approximate=approximate)


def shifted(x: Lazy, by: float) -> Lazy:
    """x + by: a mean that E[x^2] - E[x]^2 would lose."""
    return Lazy(lambda context: x(context) + by)


def offset_rows(rows: int, cols: int, stride: int, start: int) -> Lazy:
    """[rows, cols] at `stride` elements a row, beginning `start` elements into its storage."""
    flat = normal(start + rows * stride)
    return Lazy(lambda context: flat(context)[start:].view(rows, stride)[:, :cols])


def row_samples(**weights: int) -> list[Sample]:
    """Rows of every kind, with the named vectors of one value a column."""

    def sample(why: str, x: Lazy, cols: int) -> Sample:
        return Sample(why, x=x, **{name: normal(cols) for name in weights})

    return [
        sample("a decode batch that is no power of two", normal(33, 256), 256),
        sample("the smallest row: one 16-byte piece", normal(1, 8), 8),
        sample("one element a row", normal(3, 1), 1),
        sample("no rows", normal(0, 64), 64),
        sample("no columns", normal(3, 0), 0),
        sample("rows of a wider tensor", offset_rows(7, 64, 128, 0), 64),
        sample("every second row, three dimensions", normal(2, 6, 72)[:, ::1], 72),
        sample("a length of no whole number of pieces: element by element", normal(5, 259), 259),
        sample("rows that begin off a line of 128 bytes", normal(5, 1032), 1032),
        sample("rows off 16 bytes", offset_rows(4, 64, 64, 1), 64),
        sample("rows whose stride is off 16 bytes", offset_rows(4, 64, 67, 0), 64),
        sample("four pieces a thread, the last warp partly idle", normal(2, 8200), 8200),
        sample("four full pieces a thread", normal(2, 4096), 4096),
        sample("a row for four blocks, the last partly idle", normal(5, 7000), 7000),
        sample("a row for two blocks beside another's", normal(40, 8192), 8192),
        sample("more rows than SMs, each one full warp", normal(133, 1024), 1024),
        sample("more threads than 512", normal(2, 20000), 20000),
        sample("more rows than SMs, and than 4 MB hold", normal(140, 16384), 16384),
        sample("the widest row of 16-bit values in registers", normal(1, WIDEST_HELD), WIDEST_HELD),
        sample("beyond the registers: read again", normal(1, BEYOND_REGISTERS), BEYOND_REGISTERS),
    ]


def special_samples(**weights: int) -> list[Sample]:
    """Values that must not be lost or spread to other rows."""

    def sample(why: str, x: Lazy) -> Sample:
        return Sample(why, x=x, **{name: normal(64) for name in weights})

    return [
        sample("NaN stays in its row", normal(3, 64).set((1, 5), math.nan)),
        sample("an infinity in one row", normal(3, 64).set((1, 5), math.inf)),
        sample("zeros: eps alone divides", normal(2, 64, scale=0.0)),
    ]


_REFUSED_X = [
    Error(r"weight.*\[16\].*\[8\]", x=normal(2, 16), weight=normal(8)),
    Error(
        r"x: expected dtype float32 or float16 or bfloat16, got Double",
        x=normal(2, 16, dtype=torch.float64),
        weight=normal(16),
    ),
    Error(
        r"x: expected dtype float32 or float16 or bfloat16, got int32",
        x=normal(2, 16).to(torch.int32),
        weight=normal(16),
    ),
    Error(
        r"weight.*bfloat16 or float32, got float16",
        x=normal(2, 16),
        weight=normal(16).to(torch.float16),
        dtype=torch.bfloat16,
    ),
    Error(r"x.*last dimension contiguous.*\[1, 16\]", x=normal(16, 16).t(), weight=normal(16)),
    Error(r"x.*rows at one stride", x=normal(4, 3, 2, 8)[:, ::2], weight=normal(8)),
    Error(r"x.*at least 1 dim", x=normal(), weight=normal(1)),
    Error(r"weight.*contiguous.*\[2\]", x=normal(2, 16), weight=normal(32)[::2]),
]


def with_inputs(errors: list[Error], **inputs: Any) -> list[Error]:
    return [Error(e.match, dtype=e.dtype, **{**e.inputs, **inputs}) for e in errors]


def with_residual(samples: list[Sample], **extra: Any) -> list[Sample]:
    """The same with a residual of the shape of x, contiguous."""

    def like(x: Lazy) -> Lazy:
        def make(context: Any) -> Tensor:
            shape = x(context).shape
            return normal(*shape)(context)

        return Lazy(make)

    return [Sample(s.why, residual=like(s.inputs["x"]), **s.inputs, **extra) for s in samples]


CASES = [
    OpCase(
        name="rmsnorm",
        op=ridgeline.ops.rmsnorm,
        reference=_rmsnorm,
        competitor=_torch_rmsnorm,
        samples=[
            *row_samples(weight=1),
            *special_samples(weight=1),
            Sample(
                "Gemma's offset and eps", x=normal(5, 96), weight=normal(96), offset=1.0, eps=1e-3
            ),
            Sample("a weight of float32", x=normal(5, 96), weight=normal(96, dtype=torch.float32)),
        ],
        errors=_REFUSED_X,
    ),
    OpCase(
        name="add_rmsnorm",
        op=ridgeline.ops.add_rmsnorm,
        reference=_add_rmsnorm,
        competitor=_torch_add_rmsnorm,
        mutates=("residual",),
        samples=[
            *with_residual(row_samples(weight=1)),
            *with_residual(special_samples(weight=1)[:2]),
            Sample(
                "a residual of wider rows",
                x=normal(4, 64),
                residual=offset_rows(4, 64, 128, 64),
                weight=normal(64),
            ),
            Sample(
                "a residual off 16 bytes",
                x=normal(4, 64),
                residual=offset_rows(4, 64, 65, 0),
                weight=normal(64),
                offset=1.0,
            ),
        ],
        errors=[
            Error(
                r"residual: expected to be written, so no expanded dimension.*\[0, 1\]",
                x=normal(2, 16),
                residual=Lazy(lambda context: normal(1, 16)(context).expand(2, 16)),
                weight=normal(16),
            ),
            Error(
                r"residual.*shape of x, \[2, 16\], got \[2, 8\]",
                x=normal(2, 16),
                residual=normal(2, 8),
                weight=normal(16),
            ),
            Error(
                r"residual.*bfloat16, got float32",
                x=normal(2, 16),
                residual=normal(2, 16, dtype=torch.float32),
                weight=normal(16),
                dtype=torch.bfloat16,
            ),
        ],
    ),
    OpCase(
        name="layernorm",
        op=ridgeline.ops.layernorm,
        reference=_layernorm,
        competitor=_torch_layernorm,
        samples=[
            *row_samples(weight=1, bias=1),
            *special_samples(weight=1, bias=1),
            Sample("no bias", x=normal(5, 96), weight=normal(96), bias=None),
            Sample(
                "a mean far above the deviation",
                x=shifted(normal(3, 512), 50.0),
                weight=normal(512),
                bias=normal(512),
            ),
            Sample(
                "weight and bias of float32",
                x=normal(5, 96),
                weight=normal(96, dtype=torch.float32),
                bias=normal(96, dtype=torch.float32),
            ),
        ],
        errors=[
            *with_inputs(_REFUSED_X, bias=None),
            Error(r"bias.*\[16\].*\[8\]", x=normal(2, 16), weight=normal(16), bias=normal(8)),
            Error(
                r"bias.*bfloat16, got float32",
                x=normal(2, 16),
                weight=normal(16),
                bias=normal(16, dtype=torch.float32),
                dtype=torch.bfloat16,
            ),
        ],
    ),
    OpCase(
        name="layernorm_gelu",
        op=ridgeline.ops.layernorm_gelu,
        reference=_layernorm_gelu,
        competitor=_torch_layernorm_gelu,
        samples=[
            *row_samples(weight=1, bias=1),
            *special_samples(weight=1, bias=1),
            Sample(
                "the tanh approximation",
                x=normal(5, 520),
                weight=normal(520),
                bias=normal(520),
                approximate="tanh",
            ),
            Sample(
                "far into both tails",
                x=normal(5, 520),
                weight=normal(520, scale=8.0),
                bias=normal(520, scale=8.0),
            ),
        ],
        errors=[
            Error(
                r"approximate.*'none' or 'tanh', got 'erf'",
                x=normal(2, 16),
                weight=normal(16),
                bias=normal(16),
                approximate="erf",
            ),
        ],
    ),
]
