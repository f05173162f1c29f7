"""Elementwise activations, with a bias or with a gate."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import inference_only
from ridgeline.ops._out_quant import OutQuant, quantised_like, written
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


@overload
def silu_mul(x: Tensor, *, out_quant: None = ...) -> Tensor: ...
@overload
def silu_mul(x: Tensor, *, out_quant: OutQuant) -> tuple[Tensor, Tensor]: ...
def silu_mul(x: Tensor, *, out_quant: OutQuant | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """``silu(gate) * up``, where gate is the first half of the last dimension and up the second.

    Args:
        x: ``[..., 2 * cols]``, float32, float16 or bfloat16; rows contiguous and at one stride.
        out_quant: None, or "fp8" (e4m3) or "int8": the result quantised with a scale a row, or
            "fp8_group": e4m3 with a scale a group of 128 columns.

    Returns:
        A new contiguous tensor ``[..., cols]`` of the dtype of ``x``; computed in float32. With
        ``out_quant`` a pair ``(y, scale)`` as of :func:`rmsnorm`; the product is not rounded first.

    Raises:
        ValueError: dtype, shape, strides or option differ from the above; the message names the
            argument.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    if out_quant is None:
        return inference_only(_ops.silu_mul(x), "silu_mul", x)
    y, scale = _ops.silu_mul_quant(x, out_quant)
    return inference_only(y, "silu_mul", x), inference_only(scale, "silu_mul", x)


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


def swiglu_clamped(x: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    """``(u + 1) * g * sigmoid(alpha * g)``: the gated activation of gpt-oss's experts.

    ``g = gate.clamp(max=limit)`` and ``u = up.clamp(-limit, limit)``, where gate is the first half
    of the last dimension and up the second; gpt-oss's files have their columns by turns. NaN stays
    NaN, and a gate of -inf gives NaN, as in torch.

    Args:
        x: ``[..., 2 * cols]``, float32, float16 or bfloat16; rows contiguous and at one stride.
        limit: above zero; infinity clamps nothing.
        alpha: finite as a float32.

    Returns:
        A new contiguous tensor ``[..., cols]`` of the dtype of ``x``; computed in float32.

    Raises:
        ValueError: dtype, shape, strides, ``limit`` or ``alpha`` differ from the above; the message
            names the argument.

    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025 (github.com/openai/gpt-oss).
    """
    return inference_only(_ops.swiglu_clamped(x, limit, alpha), "swiglu_clamped", x)


def _half(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@register_fake("bias_gelu")
def _(x: Tensor, bias: Tensor, approximate: str, weights_ready: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_fake("silu_mul")
def _(x: Tensor) -> Tensor:
    return _half(x)


@register_fake("silu_mul_quant")
def _(x: Tensor, out_quant: str) -> tuple[Tensor, Tensor]:
    return quantised_like(_half(x), out_quant)


@register_fake("gelu_mul")
def _(x: Tensor, approximate: str) -> Tensor:
    return _half(x)


@register_fake("swiglu_clamped")
def _(x: Tensor, limit: float, alpha: float) -> Tensor:
    return _half(x)


@cost_of("bias_gelu")
def _(
    x: Tensor, bias: Tensor, approximate: Approximate = "none", *, weights_ready: bool = False
) -> Cost:
    return Cost(bytes=2 * nbytes(x) + nbytes(bias), flops=21 * x.numel())


@cost_of("silu_mul")
def _(x: Tensor, *, out_quant: OutQuant | None = None) -> Cost:
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    moved = nbytes(x) + written(shape, x.itemsize, out_quant)
    return Cost(bytes=moved, flops=5 * x.numel() // 2)


@cost_of("gelu_mul")
def _(x: Tensor, approximate: Approximate = "none") -> Cost:
    return Cost(bytes=nbytes(x) * 3 // 2, flops=21 * x.numel() // 2)


@cost_of("swiglu_clamped")
def _(x: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Cost:
    return Cost(bytes=nbytes(x) * 3 // 2, flops=10 * x.numel() // 2)
