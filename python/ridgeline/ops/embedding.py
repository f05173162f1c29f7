"""Rows of tables: what a model's first layer reads."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline._debug import check_ids
from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import inference_only
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline


def embed(
    ids: Tensor,
    weight: Tensor,
    last_tokens: Tensor | None = None,
    *,
    scale: float = 1.0,
    positions: Tensor | None = None,
    position_weight: Tensor | None = None,
    inputs_ready: bool = False,
) -> Tensor:
    """``weight[ids] * scale + position_weight[positions]``, each step rounded to the dtype.

    Args:
        ids: ``[tokens]``, int32 or int64, in ``[0, rows)``. With ``last_tokens``, ``-1 - r``
            stands for ``last_tokens[r]``: a step is launched before the host knows the tokens of
            the one ahead.
        weight: ``[rows, width]``, float32, float16 or bfloat16, the last dimension contiguous;
            int32, without scale and positions: rows of any table.
        last_tokens: int32, one dimension: ids that are known on the device.
        scale: multiplies the rows of ``weight``.
        positions: ``[tokens]``, the dtype of ``ids``, in ``[0, position_rows)``.
        position_weight: ``[position_rows, width]``, the dtype of ``weight``, given exactly with
            ``positions``.
        inputs_ready: nothing that the stream still runs writes any input, so they may be read
            before the kernels ahead have ended.

    Returns:
        ``[tokens, width]``, the dtype of ``weight``; rows keep their bits without scale and
        positions.

    Raises:
        ValueError: dtype, device or shape differ from the above. An id, a last token or a position
            outside its table is an error on the CPU and, but for last tokens, under
            ``debug_checks()``; otherwise CUDA reads row 0 for it.

    Source: ``torch.nn.functional.embedding``; the scale is Gemma's.
    """

    def least() -> int:
        return 0 if last_tokens is None else -last_tokens.shape[0]

    check_ids("ids", ids, lambda: weight.shape[0], least)
    if position_weight is not None:
        check_ids("positions", positions, lambda: position_weight.shape[0])
    out = _ops.embed(ids, weight, last_tokens, scale, positions, position_weight, inputs_ready)
    return inference_only(out, "embed", weight, position_weight)


@register_fake("embed")
def _(ids: Tensor, weight: Tensor, *args: object) -> Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]))


@cost_of("embed")
def _(
    ids: Tensor,
    weight: Tensor,
    last_tokens: Tensor | None = None,
    *,
    scale: float = 1.0,
    positions: Tensor | None = None,
    position_weight: Tensor | None = None,
    inputs_ready: bool = False,
) -> Cost:
    """Each row of a table comes once, however many tokens name it."""
    tokens, width = ids.shape[0], weight.shape[1]
    tables = [weight] if position_weight is None else [weight, position_weight]
    read = sum(min(tokens, table.shape[0]) for table in tables) * width * weight.element_size()
    written = tokens * width * weight.element_size()
    steps = (scale != 1.0) + (position_weight is not None)
    return Cost(bytes=nbytes(ids, positions) + read + written, flops=steps * tokens * width)
