"""Products of rows with the weights of different experts, which have 4 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import inference_only
from ridgeline.ops.fp4_weight import Fp4Experts
from ridgeline.ops.grouped import grouped_cost, output_like
from ridgeline.ops.int4_weight import Int4Experts
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline


def grouped_int4_linear(
    x: Tensor,
    weight: Int4Experts,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """:func:`grouped_linear` with 4-bit weights: products of what ``weight.dequantize()`` gives.

    Where experts have few rows, Hopper scales sums of a group instead, which spares each weight its
    rounding: a row's bits depend on how many there are, but with ``batch_invariant``.
    There a row of x with an infinity, or with a value of 2^63 or more, may give NaN.

    Args:
        x: ``[rows of x, K]``, the dtype of ``weight.scales``: float16 or bfloat16 (on the CPU
            float32 too); last dimension contiguous. On CUDA K is divisible by 8.
        weight: N divisible by 16, gated by 32.
        offsets, rows, bias, activation: as in :func:`grouped_linear`.
        batch_invariant: a row's bits depend on nothing but itself and its expert; few rows are
            slower on Hopper then.

    Returns:
        A new tensor ``[S, N]`` (gated: ``[S, N / 2]``), dtype of the scales.

    Raises:
        ValueError: dtype, device or shape differ from the above; the message names the argument.
        TypeError: a weight that is no :class:`Int4Experts`.
    """
    if not isinstance(weight, Int4Experts):
        raise TypeError(f"weight: expected an Int4Experts, got {type(weight).__name__}")
    out = _ops.grouped_int4_linear(
        x,
        weight.packed,
        weight.scales,
        weight.zeros,
        offsets,
        weight.N,
        weight.K,
        weight.group,
        rows,
        bias,
        activation or "none",
        batch_invariant,
    )
    return inference_only(out, "grouped_int4_linear", x, weight.scales, bias)


def grouped_fp4_linear(
    x: Tensor,
    weight: Fp4Experts,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """:func:`grouped_linear` with 4-bit floats, 32 columns of which share a power of two.

    Products of what ``weight.dequantize()`` gives, to which nothing is rounded. Hopper adds up few
    rows in another order than many: a row's bits depend on how many there are, but with
    ``batch_invariant``. There a row of x with a value of 2^64 or more may give infinities or NaN.

    Args:
        x: ``[rows of x, K]``, bfloat16 (on the CPU float32 too); last dimension contiguous.
        weight: N divisible by 16, gated by 32.
        offsets, rows, bias, activation: as in :func:`grouped_linear`.
        batch_invariant: a row's bits depend on nothing but itself and its expert; few rows are
            slower on Hopper then.

    Returns:
        A new tensor ``[S, N]`` (gated: ``[S, N / 2]``), dtype of x.

    Raises:
        ValueError: dtype, device or shape differ from the above; the message names the argument.
        TypeError: a weight that is no :class:`Fp4Experts`.

    Source: OCP, "Microscaling Formats", 2023 (MXFP4).
    """
    if not isinstance(weight, Fp4Experts):
        raise TypeError(f"weight: expected an Fp4Experts, got {type(weight).__name__}")
    out = _ops.grouped_fp4_linear(
        x,
        weight.packed,
        offsets,
        weight.N,
        weight.K,
        rows,
        bias,
        activation or "none",
        batch_invariant,
    )
    return inference_only(out, "grouped_fp4_linear", x, bias)


@register_fake("grouped_int4_linear")
def _(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    offsets: Tensor,
    N: int,
    K: int,
    group: int,
    rows: Tensor | None,
    bias: Tensor | None,
    activation: str,
    batch_invariant: bool,
) -> Tensor:
    return output_like(x, rows, N, activation, scales.dtype)


@register_fake("grouped_fp4_linear")
def _(
    x: Tensor,
    packed: Tensor,
    offsets: Tensor,
    N: int,
    K: int,
    rows: Tensor | None,
    bias: Tensor | None,
    activation: str,
    batch_invariant: bool,
) -> Tensor:
    return output_like(x, rows, N, activation, x.dtype)


@cost_of("grouped_int4_linear")
def _(
    x: Tensor,
    weight: Int4Experts,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_unused: object,
) -> Cost:
    parts = (weight.packed, weight.scales, weight.zeros)
    return _cost(x, weight, parts, (offsets, rows, bias), activation)


@cost_of("grouped_fp4_linear")
def _(
    x: Tensor,
    weight: Fp4Experts,
    offsets: Tensor,
    *,
    rows: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_unused: object,
) -> Cost:
    parts = (weight.packed,)
    return _cost(x, weight, parts, (offsets, rows, bias), activation)


def _cost(
    x: Tensor,
    weight: Int4Experts | Fp4Experts,
    parts: tuple[Tensor | None, ...],
    others: tuple[Tensor | None, ...],
    activation: str | None,
) -> Cost:
    experts = len(weight.packed)
    of_one = nbytes(*parts) / max(experts, 1)
    shape, element = (weight.N, weight.K), x.element_size()
    return grouped_cost(x, experts, of_one, shape, element, others, activation, "bf16")
