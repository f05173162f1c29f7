"""Matrix products of int8 with int8 weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import inference_only
from ridgeline.ops.gemm import empty_output, product_cost
from ridgeline.ops.norm import rmsnorm
from ridgeline.ops.quantize import quantize_int8
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline


def int8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    batch_invariant: bool = False,
    weights_ready: bool = False,
) -> Tensor:
    """:func:`linear` with an int8 weight and an int8 ``x``, each with float32 scales.

    Integers are multiplied as they are and, on CUDA where rows are of 16 bytes, summed exactly in
    int32; elsewhere sums are float32, exact up to 2**24. What follows is float32.

    Args:
        x: ``[..., K]``, int8 with ``x_scale``; or float16, bfloat16 (on the CPU float32 too),
            quantised here, by a kernel ahead: :func:`quantize_int8`, with ``norm_weight``
            :func:`rmsnorm` with ``out_quant="int8"``.
        weight: ``[N, K]``, int8; last dimension contiguous; K at most 131071.
        weight_scale: float32: one value, or ``[N]``, applied to the product.
        x_scale: float32, for an int8 ``x`` only: one value, or one a row of ``x``.
        out_dtype: of the output, for an int8 ``x``; None: bfloat16. Otherwise the dtype of ``x``.
        bias, activation, residual, norm_weight, norm_eps, batch_invariant, weights_ready: as in
            :func:`linear`; no norm for an int8 ``x``. Bits as in :func:`int4_linear`, but only
            sums beyond 2**24 can differ.

    Returns:
        A new contiguous tensor, ``[..., N]`` (gated: ``[..., N / 2]``).

    Raises:
        ValueError: dtype, device or shape differ from the above; the message names the argument.

    Source: Dettmers et al., "LLM.int8()", 2022; Xiao et al., "SmoothQuant", 2023.
    """
    is_int8 = x.dtype == torch.int8
    out = (out_dtype or torch.bfloat16) if is_int8 else (out_dtype or x.dtype)
    if not is_int8 and out != x.dtype:
        raise ValueError(f"out_dtype: expected None or the dtype of x, {x.dtype}, got {out_dtype}")
    if is_int8 != (x_scale is not None):
        wanted, got = ("a tensor", "None") if is_int8 else ("None", "a tensor")
        raise ValueError(f"x_scale: expected {wanted} for x of {x.dtype}, got {got}")
    codes, scale = x, x_scale
    if is_int8 and norm_weight is not None:
        raise ValueError("norm_weight: expected None for x of int8, got a tensor")
    if norm_weight is not None:
        if norm_weight.shape != x.shape[-1:]:
            raise ValueError(
                f"norm_weight: expected shape {list(x.shape[-1:])}, got {list(norm_weight.shape)}"
            )
        codes, scale = rmsnorm(
            x, norm_weight, norm_eps, out_quant="int8", weights_ready=weights_ready
        )
    elif not is_int8:
        codes, scale = quantize_int8(x)
    y = _ops.int8_linear(
        codes,
        weight,
        weight_scale,
        scale,
        bias,
        str(out).removeprefix("torch."),
        activation or "none",
        residual,
        batch_invariant,
        weights_ready,
        x_made_ahead=not is_int8,
    )
    return inference_only(y, "int8_linear", x, weight_scale, bias, scale, residual)


@register_fake("int8_linear")
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor,
    bias: Tensor | None,
    out_dtype: str,
    activation: str,
    residual: Tensor | None,
    batch_invariant: bool,
    weights_ready: bool,
    x_made_ahead: bool,
) -> Tensor:
    return empty_output(x, weight.shape[0], activation, getattr(torch, out_dtype))


@cost_of("int8_linear")
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    **_unused: object,
) -> Cost:
    out = out_dtype or (torch.bfloat16 if x.dtype == torch.int8 else x.dtype)
    read = nbytes(weight, weight_scale, x_scale)
    others = (bias, residual, norm_weight)
    return product_cost(x, weight.shape[0], read, out, "int8", activation, *others)
