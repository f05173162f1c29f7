"""Matrix products whose rows meet the weights of different experts."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import inference_only
from ridgeline.ops._out_quant import quantised_like, written
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline
_GATED = ("silu_mul", "gelu_mul")


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """``act(x[rows[s]] @ weight[e].T + bias[e])`` for the rows ``s`` of each expert ``e``.

    Float32 products and sums, one rounding. How many rows an expert has is read on the device: the
    launch depends on shapes alone, so a captured graph serves any routing, and no weight can be
    asked for early. Hopper adds up few rows in another order than many: a row's bits depend on how
    many there are, but with ``batch_invariant``.

    Args:
        x: ``[rows of x, K]``, float16 or bfloat16 (on the CPU float32 too); last dimension
            contiguous. On CUDA it and its rows, and the weight's, are aligned to 16 bytes.
        weight: ``[experts, N, K]``, dtype of ``x``; last dimension contiguous.
        offsets: int32 ``[experts + 1]``, from 0, not falling: expert ``e`` has the rows
            ``offsets[e]`` to ``offsets[e + 1]``, which may be none. Rows from the last one on have
            no expert and are zero.
        rows: int32 ``[S]``: the row of ``x`` that each output row is made of; None: each its own.
        bias: ``[experts, N]``.
        activation: as in :func:`linear`.
        batch_invariant: a row's bits depend on nothing but itself and its expert; few rows are
            slower on Hopper then.

    Returns:
        A new tensor ``[S, N]`` (gated: ``[S, N / 2]``), S that of ``rows``, or the rows of ``x``.

    Raises:
        ValueError: dtype, device or shape differ from the above; the message names the argument.

    Source: Gale et al., "MegaBlocks", 2022, of which this takes the padding-free products.
    """
    out = _ops.grouped_linear(x, weight, offsets, rows, bias, activation or "none", batch_invariant)
    return inference_only(out, "grouped_linear", x, weight, bias)


@overload
def grouped_fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    *,
    rows: Tensor | None = ...,
    bias: Tensor | None = ...,
    x_scale: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    activation: str | None = ...,
    batch_invariant: bool = ...,
    out_quant: None = ...,
) -> Tensor: ...
@overload
def grouped_fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    *,
    rows: Tensor | None = ...,
    bias: Tensor | None = ...,
    x_scale: Tensor | None = ...,
    out_dtype: torch.dtype | None = ...,
    activation: str | None = ...,
    batch_invariant: bool = ...,
    out_quant: Literal["fp8_group"],
) -> tuple[Tensor, Tensor]: ...
def grouped_fp8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    batch_invariant: bool = False,
    out_quant: Literal["fp8_group"] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`grouped_linear` with weights in float8 e4m3 and float32 scales.

    On Hopper bfloat16 rows, of which experts have up to 160 in the mean, are multiplied as two
    terms of e4m3 in a power of two that a row shares, but with ``batch_invariant``: what is below
    1/896 of its largest is rounded by up to 2^-17 of that, and an infinity may make its row NaN.

    Args:
        x: ``[rows of x, K]``, float16 or bfloat16 (on the CPU float32 too): the weight is expanded
            to its dtype; or float8_e4m3fn with ``x_scale``: products of codes, or, by scales of
            blocks, of both expanded, but on Hopper, with scales of 128 columns and without
            ``batch_invariant``, sums of 128 products of codes, scaled in float32.
        weight: ``[experts, N, K]``, float8_e4m3fn; last dimension contiguous. On CUDA K is
            divisible by 16.
        weight_scale: float32, ``[experts]`` or ``[experts, N]``, applied to the product; or
            ``[experts, ceil(N / 128), ceil(K / 128)]``, one a 128 x 128 block, applied to the
            weight, on CUDA rounded to the output's dtype, or, of few rows on Hopper, to sums.
        x_scale: float32, for a float8 ``x`` only: one value or one a row of ``x``; by scales of
            blocks ``[rows of x, ceil(K / 128)]`` or ``[rows of x, ceil(K / 256)]``.
        out_dtype: of the result; None: that of ``x``, or bfloat16 for a float8 ``x``.
        out_quant: "fp8_group": the output, rounded to ``out_dtype``, as :func:`quantize_fp8` with
            "group" makes codes of it: of many rows by scales of blocks, with "silu_mul" on Hopper,
            in the product's kernel.
        offsets, rows, bias, activation, batch_invariant: as in :func:`grouped_linear`.

    Returns:
        A new tensor ``[S, N]`` (gated: ``[S, N / 2]``); with ``out_quant`` float8_e4m3fn, and its
        scales, float32 ``[S, ceil(N / 128)]`` (gated: of N / 2).

    Raises:
        ValueError: dtype, device or shape differ from the above; the message names the argument.
    """
    given = (
        x,
        weight,
        weight_scale,
        offsets,
        rows,
        bias,
        x_scale,
        str(_out_dtype(x, out_dtype)).removeprefix("torch."),
        activation or "none",
        batch_invariant,
    )
    inputs = ("grouped_fp8_linear", x, weight, weight_scale, bias, x_scale)
    if out_quant is not None:
        codes, scale = _ops.grouped_fp8_linear_quant(*given, out_quant)
        return inference_only(codes, *inputs), inference_only(scale, *inputs)
    return inference_only(_ops.grouped_fp8_linear(*given), *inputs)


def _out_dtype(x: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    if out_dtype is not None:
        return out_dtype
    return torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype


def _rows_of(x: Tensor, rows: Tensor | None) -> int:
    return (x if rows is None else rows).shape[0]


def output_like(
    x: Tensor, rows: Tensor | None, N: int, activation: str, dtype: torch.dtype
) -> Tensor:
    columns = N // 2 if activation in _GATED else N
    return x.new_empty(_rows_of(x, rows), columns, dtype=dtype)


@register_fake("grouped_linear")
def _(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    bias: Tensor | None,
    activation: str,
    batch_invariant: bool,
) -> Tensor:
    return output_like(x, rows, weight.shape[1], activation, x.dtype)


@register_fake("grouped_fp8_linear")
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    bias: Tensor | None,
    x_scale: Tensor | None,
    out_dtype: str,
    activation: str,
    batch_invariant: bool,
) -> Tensor:
    return output_like(x, rows, weight.shape[1], activation, getattr(torch, out_dtype))


@register_fake("grouped_fp8_linear_quant")
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    bias: Tensor | None,
    x_scale: Tensor | None,
    out_dtype: str,
    activation: str,
    batch_invariant: bool,
    out_quant: str,
) -> tuple[Tensor, Tensor]:
    if out_quant != "fp8_group":
        raise ValueError(f"out_quant: expected None or 'fp8_group', got {out_quant!r}")
    y = output_like(x, rows, weight.shape[1], activation, getattr(torch, out_dtype))
    return quantised_like(y, out_quant)


def grouped_cost(
    x: Tensor,
    experts: int,
    of_one: float,
    shape: tuple[int, int],
    element: int,
    others: tuple[Tensor | None, ...],
    activation: str | None,
    unit: str,
    out_quant: str | None = None,
) -> Cost:
    """Of the most experts and rows of x that the rows can touch: which they do is on the device."""
    N, K = shape
    offsets, rows = others[:2]
    count = _rows_of(x, rows)
    columns = N // 2 if activation in _GATED else N
    rows_read = min(count, x.shape[0]) * K * x.itemsize
    read = rows_read + nbytes(*others) + int(min(count, experts) * of_one)
    moved = read + written((count, columns), element, out_quant)
    return Cost(bytes=moved, flops=2 * count * N * K, unit=unit)


@cost_of("grouped_linear")
def _(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_unused: object,
) -> Cost:
    experts, N, K = weight.shape
    element = x.element_size()
    unit = "fp32" if x.dtype == torch.float32 else "bf16"
    others = (offsets, rows, bias)
    return grouped_cost(x, experts, N * K * element, (N, K), element, others, activation, unit)


@cost_of("grouped_fp8_linear")
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    out_quant: str | None = None,
    **_unused: object,
) -> Cost:
    experts, N, K = weight.shape
    of_one = N * K + nbytes(weight_scale) / max(experts, 1)
    unit = "fp8" if x.dtype == torch.float8_e4m3fn else "bf16"
    element = _out_dtype(x, out_dtype).itemsize
    others = (offsets, rows, bias, x_scale)
    return grouped_cost(x, experts, of_one, (N, K), element, others, activation, unit, out_quant)
