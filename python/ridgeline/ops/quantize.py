"""Quantising to fp8 with one scale a tensor, row, group or block, and to int8 with one a row."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import inference_only
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline

Granularity = Literal["tensor", "row", "group", "group256", "block"]

_EXTENT = 128  # columns of a group, rows and columns of a block
_WIDE = 256  # columns of a wide group


def quantize_fp8(x: Tensor, granularity: Granularity = "row") -> tuple[Tensor, Tensor]:
    """Quantises to float8 e4m3 with scales taken from the values: ``x ~ q * scale``.

    Args:
        x: ``[..., cols]``, float32, float16 or bfloat16; rows contiguous and at one stride;
            two-dimensional for "block".
        granularity: what shares a scale: the "tensor", a "row", a "group" of 128 columns of a row,
            of 256 ("group256"), or a "block" of 128 rows and 128 columns. The last group or block
            may be smaller.

    Returns:
        ``(q, scale)``: ``q`` float8_e4m3fn of the shape of ``x``, rounded to nearest even, and
        float32 scales ``[1]``, ``[..., 1]``, ``[..., ceil(cols / 128 or 256)]`` or
        ``[ceil(rows / 128), ceil(cols / 128)]``. A scale is the largest magnitude / 448, and 1
        where all values are zero; never below the smallest normal float32. Infinity or NaN makes
        its whole extent dequantise to NaN.

    Raises:
        ValueError: dtype, rank or strides of ``x`` differ from the above, or another granularity.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.
    """
    q, scale = _ops.quantize_fp8(x, granularity)
    return inference_only(q, "quantize_fp8", x), inference_only(scale, "quantize_fp8", x)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises to int8 with a scale a row, taken from the values: ``x ~ q * scale``.

    Args:
        x: ``[..., cols]``, float32, float16 or bfloat16; rows contiguous and at one stride.

    Returns:
        ``(q, scale)``: ``q`` int8 of the shape of ``x``, from -127 to 127, rounded to nearest even,
        and float32 scales ``[..., 1]``: the largest magnitude / 127, and 1 where all values are
        zero; never below the smallest normal float32. Infinity or NaN makes its whole row
        dequantise to NaN.

    Raises:
        ValueError: dtype, rank or strides of ``x`` differ from the above.

    Source: Dettmers et al., "LLM.int8()", 2022.
    """
    q, scale = _ops.quantize_int8(x)
    return inference_only(q, "quantize_int8", x), inference_only(scale, "quantize_int8", x)


def _scale_shape(x: Tensor, granularity: str) -> tuple[int, ...]:
    extent = _WIDE if granularity == "group256" else _EXTENT
    across = (x.shape[-1] + extent - 1) // extent
    if granularity == "tensor":
        return (1,)
    if granularity == "row":
        return (*x.shape[:-1], 1)
    if granularity in ("group", "group256"):
        return (*x.shape[:-1], across)
    return ((x.shape[0] + _EXTENT - 1) // _EXTENT, across)


@register_fake("quantize_fp8")
def _(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(_scale_shape(x, granularity), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scale


@register_fake("quantize_int8")
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(_scale_shape(x, "row"), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.int8), scale


@cost_of("quantize_fp8")
def _(x: Tensor, granularity: Granularity = "row") -> Cost:
    scales = math.prod(_scale_shape(x, granularity))
    return Cost(bytes=nbytes(x) + x.numel() + 4 * scales, flops=3 * x.numel())


@cost_of("quantize_int8")
def _(x: Tensor) -> Cost:
    return Cost(bytes=nbytes(x) + x.numel() + 4 * math.prod(x.shape[:-1]), flops=3 * x.numel())
