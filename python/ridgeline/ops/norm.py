"""Norms over the last dimension, plain, with a residual, and fused with GELU."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline


def rmsnorm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0) -> Tensor:
    """Root-mean-square norm over the last dimension: ``x / sqrt(mean(x**2) + eps) * weight``.

    Args:
        x: ``[..., cols]``, float32, float16 or bfloat16; last dimension contiguous.
        weight: ``[cols]``, the dtype of ``x`` or float32, on the device of ``x``.
        eps: added to the mean of squares.
        offset: added to the weight; 1.0 for Gemma.

    Returns:
        A new contiguous tensor of the shape and dtype of ``x``. Statistics are taken in float32.

    Raises:
        ValueError: dtype, device or shape differ from the above; the message names the tensor.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    return _ops.rmsnorm(x, weight, eps, offset, False)


@torch.library.register_fake("ridgeline::rmsnorm")
def _(x: Tensor, weight: Tensor, eps: float, offset: float, weights_ready: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@cost_of("rmsnorm")
def _(x: Tensor, weight: Tensor, eps: float = 1e-6, *, offset: float = 0.0) -> Cost:
    return Cost(bytes=2 * nbytes(x) + nbytes(weight), flops=4 * x.numel())
