"""The clamped gated activation at its limits, and its one rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from numerics import assert_same_places
from op_table.activation import _swiglu_clamped
from ridgeline import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LIMIT = 7.0


def edges(device: str, dtype: torch.dtype) -> Tensor:
    """Each gate by each up in a row: at the limit, the next number on either side, far beyond."""
    step = torch.finfo(dtype).eps * 4  # of numbers from 4 to 8
    sizes = [0.0, 1.0, LIMIT - step, LIMIT, LIMIT + step, 100.0, 60000.0, math.inf]
    values = torch.tensor([*sizes, *(-size for size in sizes), math.nan], dtype=torch.float64)
    gate, up = torch.cartesian_prod(values, values).unbind(-1)
    return torch.stack([gate, up]).flatten()[None].to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_what_lies_beyond_the_limit_counts_as_the_limit(device: str, dtype: torch.dtype) -> None:
    x = edges(device, dtype)
    gate, up = x.chunk(2, -1)
    clamped = torch.cat([gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)], -1)
    actual = ops.swiglu_clamped(x, LIMIT)
    assert torch.equal(actual.nan_to_num(), ops.swiglu_clamped(clamped, math.inf).nan_to_num())
    expected = _swiglu_clamped(x.double(), LIMIT)
    assert_same_places(actual, expected, "swiglu_clamped")
    no_value = gate.isnan() | up.isnan() | gate.isneginf()  # -inf * sigmoid(-inf), as silu has it
    assert torch.equal(actual.isnan(), no_value)


@pytest.mark.parametrize(
    "rows, cols",
    [
        (7, 40),  # pieces of 16 bytes
        (7, 13),  # element by element
        (1027, 2120),  # four rows a thread
    ],
)
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("device", DEVICES)
def test_one_rounding(device: str, dtype: torch.dtype, rows: int, cols: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2 * cols, generator=generator).mul(6).to(dtype).to(device)
    exact = _swiglu_clamped(x.double(), LIMIT)
    error = (ops.swiglu_clamped(x, LIMIT).double() - exact).abs()
    # Half a step, and that float32 has e^-55 of gates of -32 within 2^-16.
    info = torch.finfo(dtype)
    assert (error <= exact.abs() * (info.eps / 2 + 2**-16) + info.smallest_normal * info.eps).all()
