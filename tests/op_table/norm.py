"""Rows of the norms."""

from __future__ import annotations

import ridgeline
import torch
from torch import Tensor

from op_table import Error, OpCase, Sample, normal


def _rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    scale = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * scale * (weight + offset)


def _torch_rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight + offset, eps)


CASES = [
    OpCase(
        name="rmsnorm",
        op=ridgeline.ops.rmsnorm,
        reference=_rmsnorm,
        competitor=_torch_rmsnorm,
        samples=[
            Sample("a decode batch that is no power of two", x=normal(33, 256), weight=normal(256)),
            Sample("the smallest row: one 16-byte piece", x=normal(1, 8), weight=normal(8)),
            Sample("no rows", x=normal(0, 64), weight=normal(64)),
            Sample("strided rows", x=normal(14, 64)[::2], weight=normal(64)),
        ],
        errors=[
            Error(r"weight.*\[16\].*\[8\]", x=normal(2, 16), weight=normal(8)),
        ],
    )
]
