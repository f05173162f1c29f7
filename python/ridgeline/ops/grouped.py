"""Matrix products whose rows meet the weights of different experts."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.ops._gradient import inference_only
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
) -> Tensor:
    """``act(x[rows[s]] @ weight[e].T + bias[e])`` for the rows ``s`` of each expert ``e``.

    Float32 products and sums, one rounding. How many rows an expert has is read on the device: the
    launch depends on shapes alone, so a captured graph serves any routing, and no weight can be
    asked for early. A row's bits depend on nothing but itself and its expert.

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

    Returns:
        A new tensor ``[S, N]`` (gated: ``[S, N / 2]``), S that of ``rows``, or the rows of ``x``.

    Raises:
        ValueError: dtype, device or shape differ from the above; the message names the argument.

    Source: Gale et al., "MegaBlocks", 2022, of which this takes the padding-free products.
    """
    out = _ops.grouped_linear(x, weight, offsets, rows, bias, activation or "none")
    return inference_only(out, "grouped_linear", x, weight, bias)


@torch.library.register_fake("ridgeline::grouped_linear")
def _(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    rows: Tensor | None,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    count = (x if rows is None else rows).shape[0]
    return x.new_empty(count, weight.shape[1] // (2 if activation in _GATED else 1))


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
    """Of the most experts that the rows can touch: how many they do is on the device."""
    count = (x if rows is None else rows).shape[0]
    experts, N, K = weight.shape
    columns = N // 2 if activation in _GATED else N
    touched = min(count, experts) * N * K * weight.element_size()
    read = nbytes(x, offsets, rows, bias) + touched
    unit = "fp32" if x.dtype == torch.float32 else "bf16"
    written = count * columns * x.element_size()
    return Cost(bytes=read + written, flops=2 * count * N * K, unit=unit)
