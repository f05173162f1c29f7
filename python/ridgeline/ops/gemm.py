"""Matrix products of 16-bit inputs with dense and 4-bit weights; 8 bits: gemm_fp8, gemm_int8."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import inference_only
from ridgeline.ops._out_quant import written
from ridgeline.ops.int4_weight import Int4Weight
from ridgeline.ops.norm import rmsnorm
from ridgeline.ops.quantize import quantize_fp8
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline
_GATED = ("silu_mul", "gelu_mul")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    batch_invariant: bool = False,
    weights_ready: bool = False,
) -> Tensor:
    """``act(x @ weight.T + bias) + residual``, with float32 products and sums.

    On CUDA, up to 64 rows (Hopper: but for some small weights) run on kernels of this library, with
    the epilogue fused; more rows on cuBLASLt, if it can be opened, and the epilogue in a kernel
    after it where cuBLASLt has none that rounds the same. float32 never uses TF32. On the CPU the
    product is PyTorch's BLAS.

    Args:
        x: ``[..., K]``, float32, float16 or bfloat16; last dimension contiguous.
        weight: ``[N, K]``, dtype of ``x``; last dimension contiguous.
        bias: ``[N]``.
        activation: None, "gelu", "gelu_tanh", "silu", "relu", or gated: "silu_mul", "gelu_mul",
            where ``weight`` has the N / 2 gate rows first and the result is
            ``act(gate) * up``, N / 2 columns.
        residual: of the output's shape; read, added last.
        norm_weight: ``[K]``, dtype of ``x`` or float32: ``rmsnorm(x, norm_weight, norm_eps)``
            stands for ``x``. A kernel of its own ahead of the product rounds it to the dtype of
            ``x``, as a separate op would; on Hopper up to 16 rows of bfloat16 it is a part of the
            product: ``x * norm_weight`` is rounded, and the root divides the sums.
        norm_eps: added to the mean of squares of the norm.
        batch_invariant: a row's result has the same bits whatever the other rows and their number:
            one instruction and one order of K for all, and no library GEMM. Rows of a quantised
            ``x``, and of any with quantised weights, are contiguous, or begin at multiples of 16
            bytes.
        weights_ready: no kernel of the stream still writes ``weight``, so it may be read before
            the kernels ahead have ended.

    Returns:
        A new contiguous tensor, ``[..., N]`` (gated: ``[..., N / 2]``), dtype of ``x``.

    Raises:
        ValueError: dtype, device or shape differ from the above; the message names the argument.
    """
    args = (
        x,
        weight,
        bias,
        activation or "none",
        residual,
        norm_weight,
        norm_eps,
        batch_invariant,
        weights_ready,
    )
    if torch.is_autocast_enabled("cpu") and x.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):  # the product is PyTorch's: it would be cast
            out = _ops.linear(*args)
    else:
        out = _ops.linear(*args)
    return inference_only(out, "linear", x, weight, bias, residual, norm_weight)


def int4_linear(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    act: Literal["fp8"] | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    batch_invariant: bool = False,
    weights_ready: bool = False,
) -> Tensor:
    """:func:`linear` with a 4-bit weight: products of what ``weight.dequantize()`` gives.

    On Hopper few rows may run on the integer tensor cores: the weight's integers as they are,
    times ``x`` rounded to within 2**-14 of the largest of 128 neighbours. Elsewhere the weight is
    expanded in registers, and ``x`` stays as it is.

    Args:
        x: ``[..., K]``, the dtype of ``weight.scales`` (float16 or bfloat16; on the CPU float32
            too), or float8_e4m3fn with ``x_scale`` (W4A8), which is expanded exactly and multiplied
            in the dtype of the scales; or, on Hopper with more than 4 rows (8 of wide weights, and
            of small ones without ``weights_ready``; 64 with activation order), groups that 128
            divides or one of all columns, and no zero points, multiplied as it is by the integers
            as e4m3: the tensor cores keep 14 bits of a sum of 128 columns, whose scales are applied
            in float32.
        weight: from :func:`pack_int4` or :meth:`Int4Weight.from_quantized`.
        x_scale: float32, one value or one a row of ``x``; for a float8 ``x`` only.
        act: "fp8": an ``x`` that is not float8 is quantised here, a scale a row, by a kernel ahead
            (with ``norm_weight`` the norm's).
        bias, activation, residual, norm_weight, norm_eps, batch_invariant, weights_ready: as in
            :func:`linear`. With activation order a kernel of its own prepares ``x``. Row counts
            differ in their kernels on Hopper, so a row has the same bits in every batch with
            ``batch_invariant`` alone.

    Returns:
        A new contiguous tensor, ``[..., N]`` (gated: ``[..., N / 2]``), dtype of the scales.

    Raises:
        ValueError: dtype, device or shape differ from the above; the message names the argument.
        TypeError: a weight that is no :class:`Int4Weight`.

    Source: layout after Frantar et al., "MARLIN", 2024; dequantisation after Kim et al., "Who Says
        Elephants Can't Run", 2022.
    """
    if not isinstance(weight, Int4Weight):
        raise TypeError(f"weight: expected an Int4Weight, got {type(weight).__name__}")
    values = x
    if act is not None and x.dtype != weight.scales.dtype:
        raise ValueError(
            f"x: expected the dtype of the scales, {weight.scales.dtype}, with act, got {x.dtype}"
        )
    if act is not None:
        if act != "fp8" or x_scale is not None:
            got = "x_scale beside it" if act == "fp8" else repr(act)
            raise ValueError(f"act: expected None, or 'fp8' for x that is not float8, got {got}")
        if norm_weight is None:
            values, x_scale = quantize_fp8(x, "row")
        else:
            values, x_scale = rmsnorm(
                x, norm_weight, norm_eps, out_quant="fp8", weights_ready=weights_ready
            )
            norm_weight = None
    out = _ops.int4_linear(
        values,
        weight.packed,
        weight.scales,
        weight.zeros,
        weight.perm,
        weight.N,
        weight.K,
        weight.group,
        bias,
        x_scale,
        activation or "none",
        residual,
        norm_weight,
        norm_eps,
        batch_invariant,
        weights_ready,
        x_made_ahead=act is not None,
    )
    others = weight.scales, bias, x_scale, residual, norm_weight
    return inference_only(out, "int4_linear", x, *others)


# ---- Shapes without data -----------------------------------------------------------------------


def empty_output(x: Tensor, N: int, activation: str, dtype: torch.dtype) -> Tensor:
    columns = N // 2 if activation in _GATED else N
    return x.new_empty((*x.shape[:-1], columns), dtype=dtype)


@register_fake("linear")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    batch_invariant: bool,
    weights_ready: bool,
) -> Tensor:
    return empty_output(x, weight.shape[0], activation, x.dtype)


@register_fake("int4_linear")
def _(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    perm: Tensor | None,
    N: int,
    K: int,
    group: int,
    bias: Tensor | None,
    x_scale: Tensor | None,
    activation: str,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    norm_eps: float,
    batch_invariant: bool,
    weights_ready: bool,
    x_made_ahead: bool,
) -> Tensor:
    return empty_output(x, N, activation, scales.dtype)


# ---- Costs -------------------------------------------------------------------------------------

_UNITS = {torch.float16: "bf16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def unit_of(dtype: torch.dtype, name: str) -> str:
    """The unit that multiplies values of ``dtype``, which the argument ``name`` has."""
    if dtype not in _UNITS:
        raise ValueError(f"{name}: expected dtype float32, float16 or bfloat16, got {dtype}")
    return _UNITS[dtype]


def product_cost(
    x: Tensor,
    N: int,
    weight_bytes: int,
    out_dtype: torch.dtype,
    unit: str,
    activation: str | None,
    *others: Tensor | None,
    out_quant: str | None = None,
) -> Cost:
    columns = N // 2 if activation in _GATED else N
    moved = nbytes(x, *others) + weight_bytes
    moved += written((*x.shape[:-1], columns), out_dtype.itemsize, out_quant)
    return Cost(bytes=moved, flops=2 * x.numel() * N, unit=unit)


@cost_of("linear")
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    **_unused: object,
) -> Cost:
    return product_cost(
        x,
        weight.shape[0],
        nbytes(weight),
        x.dtype,
        unit_of(x.dtype, "x"),
        activation,
        bias,
        residual,
        norm_weight,
    )


@cost_of("int4_linear")
def _(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    *,
    x_scale: Tensor | None = None,
    act: str | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    **_unused: object,
) -> Cost:
    read = nbytes(weight.packed, weight.scales, weight.zeros, weight.perm, x_scale)
    dtype = weight.scales.dtype
    unit = "fp8" if act or x.dtype == torch.float8_e4m3fn else unit_of(dtype, "weight.scales")
    return product_cost(x, weight.N, read, dtype, unit, activation, bias, residual, norm_weight)
