"""Factors of columns that make a weight lose less when it is rounded: AWQ's search."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline._quantize.moments import Moments
from ridgeline._quantize.schemes import Scheme

_STEPS = 20


def output_error(lost: Tensor, moments: Tensor) -> float:
    """The sum of squares of ``x @ lost^T`` over the inputs whose sum of ``x x^T`` is given."""
    return float((lost @ moments).mul_(lost).sum())


def awq_factors(
    readers: Sequence[tuple[Tensor, Moments]], scheme: Scheme, *, repeats: tuple[int, int, int]
) -> Tensor:
    """What the columns of ``readers`` should be multiplied by before they are rounded.

    The factors are the mean magnitudes of the inputs to a power: of the powers 0 (which leaves
    the columns), 0.05, ... 0.95 the one whose rounded weights lose least of their products.

    Args:
        readers: weights, float32 ``[N, K]``, and what they see; all read the same columns.
        repeats: ``(a, b, c)``, with ``a * b * c = K``: columns that differ in the second of these
            indices have one factor.

    Source: Lin et al., "AWQ", 2023.
    """
    total = sum(seen.total for _, seen in readers)
    mean = total / max(sum(seen.count for _, seen in readers), 1)
    assert isinstance(mean, Tensor)
    mean = mean.view(repeats).mean(1, keepdim=True).expand(repeats).flatten().clamp(min=1e-4)
    best, least = torch.ones_like(mean), float("inf")
    for step in range(_STEPS):
        factors = mean ** (step / _STEPS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = 0.0
        for weight, seen in readers:
            assert seen.product is not None
            error += _error(weight, factors, scheme, seen.product)
        if error < least:
            best, least = factors, error
    return best


def _error(weight: Tensor, factors: Tensor, scheme: Scheme, moments: Tensor) -> float:
    rounded = scheme.nearest(weight * factors).dequantize(torch.float32)
    return output_error(rounded.div_(factors).sub_(weight), moments)
