"""Outputs as 8-bit codes with float32 scales: what ops with ``out_quant`` share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

OutQuant = Literal["fp8", "int8", "fp8_group"]

_GROUPS = {"fp8_group": 128, "fp8_group256": 256}  # columns that share a scale, if not a row's


def _scales(cols: int, out_quant: str) -> int:
    group = _GROUPS.get(out_quant)
    return 1 if group is None else (cols + group - 1) // group


def quantised_like(y: Tensor, out_quant: str) -> tuple[Tensor, Tensor]:
    """Codes and scales for an output of the shape of ``y``."""
    dtype = torch.int8 if out_quant == "int8" else torch.float8_e4m3fn
    shape = (*y.shape[:-1], _scales(y.shape[-1], out_quant))
    return y.new_empty(y.shape, dtype=dtype), y.new_empty(shape, dtype=torch.float32)


def written(shape: Sequence[int], itemsize: int, out_quant: str | None) -> int:
    """Bytes of an output of this shape: elements of ``itemsize``, or codes and scales."""
    elements = math.prod(shape)
    if out_quant is None:
        return elements * itemsize
    return elements + 4 * math.prod(shape[:-1]) * _scales(shape[-1], out_quant)
