"""Norms over the last dimension, plain, with a residual, quantised, and fused with GELU."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import changed_in_place, inference_only, refuse_in_place
from ridgeline.ops._out_quant import OutQuant, quantised_like, written
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline

Approximate = Literal["none", "tanh"]


@overload
def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float = ...,
    *,
    offset: float = ...,
    out_quant: None = ...,
    weights_ready: bool = ...,
) -> Tensor: ...
@overload
def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float = ...,
    *,
    offset: float = ...,
    out_quant: OutQuant,
    weights_ready: bool = ...,
) -> tuple[Tensor, Tensor]: ...
def rmsnorm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    out_quant: OutQuant | None = None,
    weights_ready: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square norm over the last dimension: ``x / sqrt(mean(x**2) + eps) * weight``.

    Args:
        x: ``[..., cols]``, float32, float16 or bfloat16; rows contiguous and at one stride.
        weight: ``[cols]``, the dtype of ``x`` or float32, on the device of ``x``.
        eps: added to the mean of squares.
        offset: added to the weight; 1.0 for Gemma.
        out_quant: None, or "fp8" (e4m3) or "int8": the result quantised with a scale a row, or
            "fp8_group": e4m3 with a scale a group of 128 columns.
        weights_ready: no kernel still running on the stream writes ``weight``.

    Returns:
        A new contiguous tensor of the shape and dtype of ``x``; with ``out_quant`` a pair
        ``(y, scale)``: 8-bit codes and float32 scales ``[..., 1]`` or ``[..., ceil(cols / 128)]``,
        value = y * scale, where scale is the largest magnitude of the row or group / 448 (fp8) or
        127 (int8), and 1 where all are zero. A row with infinity or NaN dequantises to NaN.
        Statistics are taken in float32.

    Raises:
        ValueError: dtype, device, shape, strides or option differ from the above; the message
            names the argument.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    if out_quant is None:
        out = _ops.rmsnorm(x, weight, eps, offset, weights_ready)
        return inference_only(out, "rmsnorm", x, weight)
    y, scale = _ops.rmsnorm_quant(x, weight, eps, offset, out_quant, weights_ready)
    return inference_only(y, "rmsnorm", x, weight), inference_only(scale, "rmsnorm", x, weight)


@overload
def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = ...,
    *,
    offset: float = ...,
    out_quant: None = ...,
    weights_ready: bool = ...,
) -> Tensor: ...
@overload
def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = ...,
    *,
    offset: float = ...,
    out_quant: OutQuant,
    weights_ready: bool = ...,
) -> tuple[Tensor, Tensor]: ...
def add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    out_quant: OutQuant | None = None,
    weights_ready: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Adds ``x`` to ``residual`` in place and returns the root-mean-square norm of the sum.

    Args:
        x: ``[..., cols]``, float32, float16 or bfloat16; rows contiguous and at one stride.
        residual: the shape, dtype and device of ``x``; not overlapping it. Becomes
            ``residual + x``, rounded to its dtype; the norm is that of the rounded sum.
        weight, eps, offset, out_quant, weights_ready: as for :func:`rmsnorm`.

    Returns:
        As :func:`rmsnorm`.

    Raises:
        ValueError: dtype, device, shape, strides or option differ from the above; the message
            names the argument, and ``residual`` is unchanged.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    refuse_in_place("add_rmsnorm", x, residual)
    if out_quant is None:
        out = _ops.add_rmsnorm(x, residual, weight, eps, offset, weights_ready)
        changed_in_place(residual)
        return inference_only(out, "add_rmsnorm", x, weight)
    y, scale = _ops.add_rmsnorm_quant(x, residual, weight, eps, offset, out_quant, weights_ready)
    changed_in_place(residual)
    inputs = "add_rmsnorm", x, weight
    return inference_only(y, *inputs), inference_only(scale, *inputs)


def layernorm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    weights_ready: bool = False,
) -> Tensor:
    """Layer norm over the last dimension: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Args:
        x: ``[..., cols]``, float32, float16 or bfloat16; rows contiguous and at one stride.
        weight: ``[cols]``, the dtype of ``x`` or float32, on the device of ``x``.
        bias: ``[cols]``, the dtype of ``weight``, or None.
        eps: added to the variance (the mean of centred squares).
        weights_ready: no kernel still running on the stream writes ``weight`` or ``bias``.

    Returns:
        A new contiguous tensor of the shape and dtype of ``x``. Mean and centred sum of squares
        are taken in float32, one after the other.

    Raises:
        ValueError: dtype, device, shape or strides differ from the above; the message names the
            argument.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
    """
    out = _ops.layernorm(x, weight, bias, eps, weights_ready)
    return inference_only(out, "layernorm", x, weight, bias)


def layernorm_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-5,
    approximate: Approximate = "none",
    *,
    weights_ready: bool = False,
) -> Tensor:
    """``gelu(layernorm(x, weight, bias, eps))`` in one pass, without rounding between the two.

    Args:
        x, weight, bias, eps, weights_ready: as for :func:`layernorm`.
        approximate: "none" for ``v * Phi(v)``, "tanh" for its tanh approximation.

    Returns:
        A new contiguous tensor of the shape and dtype of ``x``.

    Raises:
        ValueError: as :func:`layernorm`, or another value of ``approximate``.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """
    out = _ops.layernorm_gelu(x, weight, bias, eps, approximate, weights_ready)
    return inference_only(out, "layernorm_gelu", x, weight, bias)


# ---- Fakes --------------------------------------------------------------------------------------


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@register_fake("rmsnorm")
def _(x: Tensor, weight: Tensor, eps: float, offset: float, weights_ready: bool) -> Tensor:
    return _like(x)


@register_fake("rmsnorm_quant")
def _(
    x: Tensor, weight: Tensor, eps: float, offset: float, out_quant: str, weights_ready: bool
) -> tuple[Tensor, Tensor]:
    return quantised_like(x, out_quant)


@register_fake("add_rmsnorm")
def _(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, weights_ready: bool
) -> Tensor:
    return _like(x)


@register_fake("add_rmsnorm_quant")
def _(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    out_quant: str,
    weights_ready: bool,
) -> tuple[Tensor, Tensor]:
    return quantised_like(x, out_quant)


@register_fake("layernorm")
def _(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, weights_ready: bool) -> Tensor:
    return _like(x)


@register_fake("layernorm_gelu")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    approximate: str,
    weights_ready: bool,
) -> Tensor:
    return _like(x)


# ---- Costs --------------------------------------------------------------------------------------


@cost_of("rmsnorm")
def _(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    out_quant: OutQuant | None = None,
    weights_ready: bool = False,
) -> Cost:
    return Cost(
        bytes=nbytes(x, weight) + written(x.shape, x.itemsize, out_quant), flops=4 * x.numel()
    )


@cost_of("add_rmsnorm")
def _(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    out_quant: OutQuant | None = None,
    weights_ready: bool = False,
) -> Cost:
    moved = nbytes(x, residual, residual, weight) + written(x.shape, x.itemsize, out_quant)
    return Cost(bytes=moved, flops=5 * x.numel())


@cost_of("layernorm")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    weights_ready: bool = False,
) -> Cost:
    return Cost(bytes=2 * nbytes(x) + nbytes(weight, bias), flops=7 * x.numel())


@cost_of("layernorm_gelu")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float = 1e-5,
    approximate: Approximate = "none",
    *,
    weights_ready: bool = False,
) -> Cost:
    return Cost(bytes=2 * nbytes(x) + nbytes(weight, bias), flops=27 * x.numel())
