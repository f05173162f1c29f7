"""Reductions over the last dimension, and softmax."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import inference_only
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline

ReduceOp = Literal["sum", "mean", "max", "min", "argmax", "logsumexp"]


def row_reduce(x: Tensor, op: ReduceOp) -> Tensor:
    """Reduces the last dimension.

    Args:
        x: ``[..., cols]``, float32, float16 or bfloat16; rows contiguous and at one stride.
        op: "sum", "mean", "max", "min", "argmax" or "logsumexp" (natural logarithm).

    Returns:
        A new contiguous tensor ``[...]`` of the dtype of ``x``; int64 for "argmax". Accumulated
        in float32. NaN in a row gives NaN; "argmax" gives the first NaN, else the first maximum.
        Without columns "sum" is 0, "mean" NaN and "logsumexp" -inf.

    Raises:
        ValueError: dtype or strides of ``x`` differ from the above, ``op`` is another, or there
            are no columns for "max", "min" or "argmax".

    Source: the reductions of torch.
    """
    return inference_only(_ops.row_reduce(x, op), "row_reduce", x)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension: ``exp(x - max) / sum(exp(x - max))``.

    Args:
        x: ``[..., cols]``, float32, float16 or bfloat16; rows contiguous and at one stride.

    Returns:
        A new contiguous tensor of the shape and dtype of ``x``; computed in float32. A row that
        holds NaN or +inf, or -inf alone, is NaN throughout, as with ``torch.softmax``.

    Raises:
        ValueError: dtype or strides of ``x`` differ from the above.

    Source: ``torch.softmax``.
    """
    return inference_only(_ops.softmax(x), "softmax", x)


@register_fake("row_reduce")
def _(x: Tensor, op: str) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.int64 if op == "argmax" else x.dtype)


@register_fake("softmax")
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@cost_of("row_reduce")
def _(x: Tensor, op: ReduceOp) -> Cost:
    written = math.prod(x.shape[:-1]) * (8 if op == "argmax" else x.element_size())
    return Cost(bytes=nbytes(x) + written, flops=(5 if op == "logsumexp" else 1) * x.numel())


@cost_of("softmax")
def _(x: Tensor) -> Cost:
    return Cost(bytes=2 * nbytes(x), flops=7 * x.numel())
