"""What "correct" means: error against float64 within twice PyTorch's own in the same dtype, plus
one rounding of the reference; infinities and NaN in the same places.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Bound = Any


def as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def to_float64(value: Any) -> Any:
    """Floating tensors as float64 on the CPU, other tensors on the CPU, anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().cpu().clone()
    return copy.double() if copy.is_floating_point() else copy


def assert_same_places(actual: Tensor, expected: Tensor, what: str) -> None:
    """Infinities (with sign) and NaN stand where the reference has them."""
    for name, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differ = (test(actual) != test(expected)).nonzero()
        assert len(differ) == 0, (
            f"{what}: {name} differs at {len(differ)} places, first {differ[0].tolist()}: "
            f"got {actual[tuple(differ[0])]}, expected {expected[tuple(differ[0])]}"
        )


def assert_close(actual: Tensor, expected: Tensor, allowed: Any, what: str) -> None:
    """|actual - expected| <= allowed wherever the reference is finite."""
    assert_same_places(actual, expected, what)
    finite = torch.isfinite(expected)
    error = torch.where(finite, (actual - expected).abs(), 0.0)
    excess = error - torch.as_tensor(allowed, dtype=torch.float64)
    if excess.numel() and excess.max() > 0:
        at = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
        raise AssertionError(
            f"{what}: error {error[at].item():.3e} over the bound by {excess[at].item():.3e} at "
            f"{list(at)}: got {actual[at].item()!r}, expected {expected[at].item()!r}"
        )


def one_rounding(expected: Tensor, dtype: torch.dtype) -> Tensor:
    """One rounding of the reference to `dtype`, subnormals included."""
    info = torch.finfo(dtype)
    return torch.where(torch.isfinite(expected), expected.abs(), 0.0) * info.eps + info.tiny


def competitor_bound(competitor: Tensor, expected: Tensor, dtype: torch.dtype) -> Tensor:
    """Twice the competitor's largest error, plus one rounding of the reference."""
    error = torch.where(torch.isfinite(expected), (competitor.double() - expected).abs(), 0.0)
    error = torch.nan_to_num(error, nan=0.0, posinf=0.0)
    worst = error.max() if error.numel() else torch.zeros((), dtype=torch.float64)
    return 2 * worst + one_rounding(expected, dtype)
