"""Matrix products with fp8 weights."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import changed_in_place, inference_only, refuse_in_place
from ridgeline.ops._out_quant import quantised_like
from ridgeline.ops.gemm import empty_output, product_cost, unit_of
from ridgeline.roofline.cost import Cost, cost_of, nbytes, op_cost

_ops = torch.ops.ridgeline


@overload
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = ...,
    *,
    x_scale: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    activation: str | None = ...,
    residual: Tensor | None = ...,
    norm_weight: Tensor | None = ...,
    norm_eps: float = ...,
    quantize_x: bool = ...,
    batch_invariant: bool = ...,
    weights_ready: bool = ...,
    out_quant: None = ...,
) -> Tensor: ...
@overload
def fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = ...,
    *,
    x_scale: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    activation: str | None = ...,
    residual: Tensor | None = ...,
    norm_weight: Tensor | None = ...,
    norm_eps: float = ...,
    quantize_x: bool = ...,
    batch_invariant: bool = ...,
    weights_ready: bool = ...,
    out_quant: Literal["fp8_group256"],
) -> tuple[Tensor, Tensor]: ...
def fp8_linear(
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
    quantize_x: bool = False,
    batch_invariant: bool = False,
    weights_ready: bool = False,
    out_quant: Literal["fp8_group256"] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`linear` with a weight in float8 e4m3 and float32 scales.

    Args:
        x: ``[..., K]``, float16 or bfloat16 (on the CPU float32 too): the weight is expanded to
            that dtype, exactly (on Hopper up to 8 rows bfloat16 is kept as float16 in a power of
            two that 256 columns share: what is far smaller than its neighbours is rounded; 33 to
            64 rows of bfloat16, with scales of blocks also 9 to 32, by a weight whose tiles of 224
            rows fill the SMs are multiplied as two float8 terms in a power of two that a row
            shares: what is below 1/896 of its largest is rounded by up to 2^-17 of that, and sums
            of 128 columns keep 14 bits); or
            float8_e4m3fn with ``x_scale``: both are expanded, exactly, or,
            on Hopper with more than 8 rows, and of fewer but one where that is faster, multiplied
            as they are: the tensor cores keep 14 bits of a sum of 128 columns (or 256 of more than
            64 rows, without scales of 128 columns), which is added in float32.
        weight: ``[N, K]``, float8_e4m3fn; last dimension contiguous.
        weight_scale: float32: one value, or ``[N]``, applied to the product in float32; or
            ``[ceil(N / 128), ceil(K / 128)]``, one a 128 x 128 block, applied to the expanded
            weight and, on CUDA, rounded to the dtype of the output; on Hopper up to 32 rows, up to
            64 where blocks of the product have an SM each, and where both are multiplied as they
            are, applied to sums in float32.
        x_scale: float32, for a float8 ``x`` only: one value, or one a row of ``x``, applied to the
            product; or ``[..., ceil(K / 128)]`` or ``[..., ceil(K / 256)]``, one a group of so many
            columns, applied to sums of those or, up to 64 rows, off Hopper, and with other than
            bfloat16 products alone of 256, to the expanded ``x``.
        quantize_x: ``x`` of another dtype, normalized if ``norm_weight`` is given, becomes
            float8_e4m3fn first, a scale a row, as :func:`quantize_fp8` and :func:`rmsnorm` make
            them: one row on Hopper in the product's kernel.
        out_dtype: of the output, for a float8 ``x``; None: bfloat16. Otherwise the dtype of ``x``.
        out_quant: "fp8_group256": the output, rounded to ``out_dtype``, as :func:`quantize_fp8`
            with "group256" makes codes of it: of many rows and "silu_mul" on Hopper in the
            product's kernel.
        bias, activation, residual, norm_weight, norm_eps, batch_invariant, weights_ready: as in
            :func:`linear`; no norm for a float8 ``x``. Bits as in :func:`int4_linear`.

    Returns:
        A new contiguous tensor, ``[..., N]`` (gated: ``[..., N / 2]``); with ``out_quant``
        float8_e4m3fn, and its scales, float32 ``[..., ceil(N / 256)]`` (gated: of N / 2).

    Raises:
        ValueError: dtype, device or shape differ from the above; the message names the argument.

    Source: Micikevicius et al., "FP8 formats for deep learning", 2022.
    """
    is_fp8 = x.dtype == torch.float8_e4m3fn
    out = (out_dtype or torch.bfloat16) if is_fp8 else (out_dtype or x.dtype)
    if not is_fp8 and out != x.dtype:
        raise ValueError(f"out_dtype: expected None or the dtype of x, {x.dtype}, got {out_dtype}")
    given = (
        x,
        weight,
        weight_scale,
        bias,
        x_scale,
        str(out).removeprefix("torch."),
        activation or "none",
        residual,
        norm_weight,
        norm_eps,
        quantize_x,
        batch_invariant,
        weights_ready,
    )
    others = weight, weight_scale, bias, x_scale, residual, norm_weight
    inputs = ("fp8_linear", x, *others)
    if out_quant is not None:
        codes, scale = _ops.fp8_linear_quant(*given, out_quant)
        return inference_only(codes, *inputs), inference_only(scale, *inputs)
    return inference_only(_ops.fp8_linear(*given), *inputs)


def fp8_linear_add(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    quantize_x: bool = False,
    batch_invariant: bool = False,
    weights_ready: bool = False,
) -> None:
    """Adds :func:`fp8_linear` to ``residual`` in place; product and sum are rounded, each.

    One kernel on Hopper where many float8 rows meet a float8 weight: L2 adds what it stores.

    Args:
        residual: contiguous, ``[..., N]``, in the dtype of the output; overlaps no other argument.
        x, weight, weight_scale, bias, x_scale, quantize_x, batch_invariant, weights_ready: as in
            :func:`fp8_linear`.

    Raises:
        ValueError: dtype, device or shape differ from the above; the message names the argument,
            and ``residual`` is unchanged.

    Source: as :func:`fp8_linear`.
    """
    refuse_in_place("fp8_linear_add", x, weight, weight_scale, residual, bias, x_scale)
    _ops.fp8_linear_add(
        x,
        weight,
        weight_scale,
        residual,
        bias,
        x_scale,
        quantize_x,
        batch_invariant,
        weights_ready,
    )
    changed_in_place(residual)


@register_fake("fp8_linear_add")
def _(*args: object) -> None:
    return None


@register_fake("fp8_linear")
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    out_dtype: str,
    activation: str,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    quantize_x: bool,
    batch_invariant: bool,
    weights_ready: bool,
) -> Tensor:
    return empty_output(x, weight.shape[0], activation, getattr(torch, out_dtype))


@register_fake("fp8_linear_quant")
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    out_dtype: str,
    activation: str,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    quantize_x: bool,
    batch_invariant: bool,
    weights_ready: bool,
    out_quant: str,
) -> tuple[Tensor, Tensor]:
    if out_quant != "fp8_group256":
        raise ValueError(f"out_quant: expected None or 'fp8_group256', got {out_quant!r}")
    y = empty_output(x, weight.shape[0], activation, getattr(torch, out_dtype))
    return quantised_like(y, out_quant)


@cost_of("fp8_linear")
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
    quantize_x: bool = False,
    out_quant: str | None = None,
    **_unused: object,
) -> Cost:
    is_fp8 = x.dtype == torch.float8_e4m3fn
    out = out_dtype or (torch.bfloat16 if is_fp8 else x.dtype)
    unit = "fp8" if is_fp8 or quantize_x else unit_of(out, "out_dtype" if out_dtype else "x")
    read = nbytes(weight, weight_scale, x_scale)
    return product_cost(
        x,
        weight.shape[0],
        read,
        out,
        unit,
        activation,
        bias,
        residual,
        norm_weight,
        out_quant=out_quant,
    )


@cost_of("fp8_linear_add")
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    quantize_x: bool = False,
    **_unused: object,
) -> Cost:
    return op_cost(
        "fp8_linear",
        *(x, weight, weight_scale, bias),
        x_scale=x_scale,
        out_dtype=residual.dtype,
        residual=residual,
        quantize_x=quantize_x,
    )
