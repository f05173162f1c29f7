"""Elementwise activations, with a bias or with a gate."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ridgeline.ops._gradient import inference_only
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline

Approximate = Literal["none", "tanh"]


def bias_gelu(
    x: Tensor, bias: Tensor, approximate: Approximate = "none", *, weights_ready: bool = False
) -> Tensor:
    """``gelu(x + bias)``, the sum not rounded.

    Args:
        x: ``[..., cols]``, float32, float16 or bfloat16; rows contiguous and at one stride.
        bias: ``[cols]``, the dtype and device of ``x``.
        approximate: "none" for ``v * Phi(v)``, "tanh" for its tanh approximation.
        weights_ready: no kernel still running on the stream writes ``bias``.

    Returns:
        A new contiguous tensor of the shape and dtype of ``x``; computed in float32.

    Raises:
        ValueError: dtype, device, shape, strides or ``approximate`` differ from the above; the
            message names the argument.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    out = _ops.bias_gelu(x, bias, approximate, weights_ready)
    return inference_only(out, "bias_gelu", x, bias)


def silu_mul(x: Tensor) -> Tensor:
    """``silu(gate) * up``, where gate is the first half of the last dimension and up the second.

    Args:
        x: ``[..., 2 * cols]``, float32, float16 or bfloat16; rows contiguous and at one stride.

    Returns:
        A new contiguous tensor ``[..., cols]`` of the dtype of ``x``; computed in float32.

    Raises:
        ValueError: dtype, shape or strides differ from the above; the message names ``x``.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return inference_only(_ops.silu_mul(x), "silu_mul", x)


def gelu_mul(x: Tensor, approximate: Approximate = "none") -> Tensor:
    """``gelu(gate) * up``, where gate is the first half of the last dimension and up the second.

    Args:
        x: ``[..., 2 * cols]``, float32, float16 or bfloat16; rows contiguous and at one stride.
        approximate: "none" for ``v * Phi(v)``, "tanh" for its tanh approximation.

    Returns:
        A new contiguous tensor ``[..., cols]`` of the dtype of ``x``; computed in float32.

    Raises:
        ValueError: dtype, shape, strides or ``approximate`` differ from the above; the message
            names the argument.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    return inference_only(_ops.gelu_mul(x, approximate), "gelu_mul", x)


def _half(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.register_fake("ridgeline::bias_gelu")
def _(x: Tensor, bias: Tensor, approximate: str, weights_ready: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("ridgeline::silu_mul")
def _(x: Tensor) -> Tensor:
    return _half(x)


@torch.library.register_fake("ridgeline::gelu_mul")
def _(x: Tensor, approximate: str) -> Tensor:
    return _half(x)


@cost_of("bias_gelu")
def _(
    x: Tensor, bias: Tensor, approximate: Approximate = "none", *, weights_ready: bool = False
) -> Cost:
    return Cost(bytes=2 * nbytes(x) + nbytes(bias), flops=21 * x.numel())


@cost_of("silu_mul")
def _(x: Tensor) -> Cost:
    return Cost(bytes=nbytes(x) * 3 // 2, flops=5 * x.numel() // 2)


@cost_of("gelu_mul")
def _(x: Tensor, approximate: Approximate = "none") -> Cost:
    return Cost(bytes=nbytes(x) * 3 // 2, flops=21 * x.numel() // 2)
