"""Which experts each token goes to, and what they make of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline._debug import check_ids
from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import inference_only
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline


class Routing(NamedTuple):
    """The choices of all tokens, in the order of tokens and in that of experts.

    Attributes:
        weights: float32 ``[tokens, per_token]``, of a token's largest logit first.
        offsets: int32 ``[experts + 1]``: where each expert's rows begin.
        rows: int32 ``[tokens * per_token]``: the token of each row, of expert 0 first, within an
            expert in the order of the tokens.
        places: int32 ``[tokens, per_token]``: the row of each choice, so that
            ``rows[places[t, j]] == t``.
    """

    weights: Tensor
    offsets: Tensor
    rows: Tensor
    places: Tensor


def route_experts(logits: Tensor, per_token: int, *, normalized: bool = True) -> Routing:
    """Each token's experts with the largest logits, as the products of experts take them.

    ``offsets`` and ``rows`` are those of :func:`grouped_linear`; :func:`combine_experts` takes
    ``places`` and ``weights``. Integers have the same bits on the CPU and on CUDA.

    Args:
        logits: ``[tokens, experts]``, float32, float16 or bfloat16; the last dimension contiguous;
            1 to 1023 experts. NaN is the largest logit, as in ``torch.topk``; of equal ones the
            lowest expert comes first.
        per_token: how many experts a token chooses, 1 to the smaller of ``experts`` and 32.
        normalized: weights are the softmax of the chosen logits; else what these have of the
            softmax over all experts.

    Returns:
        A :class:`Routing`.

    Raises:
        ValueError: dtype, shape or number differs from the above; the message names the argument.

    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017; the order of rows is that
    of Gale et al., "MegaBlocks", 2022.
    """
    weights, offsets, rows, places = _ops.route_experts(logits, per_token, normalized)
    return Routing(inference_only(weights, "route_experts", logits), offsets, rows, places)


class ExpertOrder(NamedTuple):
    """Choices in the order of experts, as in :class:`Routing`.

    Attributes:
        offsets: int32 ``[experts + 1]``: where each expert's rows begin; from the last one on rows
            are nobody's.
        rows: int32 ``[tokens * per_token]``: the token of each row.
        places: int32 ``[tokens, per_token]``: the row of each choice.
    """

    offsets: Tensor
    rows: Tensor
    places: Tensor


def order_experts(chosen: Tensor, experts: int) -> ExpertOrder:
    """Choices that a router of any kind has made, as the products of experts take them.

    What :func:`route_experts` gives beside the weights. Within an expert rows are in the order of
    the tokens, and of one token in that of its choices. The same bits on the CPU and on CUDA.

    Args:
        chosen: ``[tokens, per_token]``, int32 or int64, of any strides: the experts of each token,
            any number of them, and one as often as it may be. Values outside ``[0, experts)`` are
            nobody's: their rows come last, and :func:`grouped_linear` leaves them zero.
        experts: how many there are, 1 to 1023.

    Returns:
        An :class:`ExpertOrder`.

    Raises:
        ValueError: dtype, shape or number differs from the above; the message names the argument.

    Source: as :func:`route_experts`.
    """
    return ExpertOrder(*_ops.order_experts(chosen, experts))


def combine_experts(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """``sum_j weights[t, j] * x[places[t, j]]`` for each token ``t``.

    Fused multiply-adds in float32 in the order of ``j``, one rounding: the same bits on the CPU
    and on CUDA.

    Args:
        x: ``[rows, N]``, float32, float16 or bfloat16; the last dimension contiguous.
        places: int32 ``[tokens, per_token]``, in ``[0, rows)``.
        weights: float32 ``[tokens, per_token]``.

    Returns:
        A new tensor ``[tokens, N]``, dtype of ``x``.

    Raises:
        ValueError: dtype, device or shape differ from the above; the message names the argument.
            A place outside ``x`` is an error on the CPU and under ``debug_checks()``; otherwise
            CUDA reads row 0 for it.
    """
    check_ids("places", places, lambda: x.shape[0])
    out = _ops.combine_experts(x, places, weights)
    return inference_only(out, "combine_experts", x, weights)


@register_fake("route_experts")
def _(logits: Tensor, per_token: int, normalized: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, experts = logits.shape
    return (
        logits.new_empty((tokens, per_token), dtype=torch.float32),
        logits.new_empty((experts + 1,), dtype=torch.int32),
        logits.new_empty((tokens * per_token,), dtype=torch.int32),
        logits.new_empty((tokens, per_token), dtype=torch.int32),
    )


@register_fake("order_experts")
def _(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, per_token = chosen.shape
    return (
        chosen.new_empty((experts + 1,), dtype=torch.int32),
        chosen.new_empty((tokens * per_token,), dtype=torch.int32),
        chosen.new_empty((tokens, per_token), dtype=torch.int32),
    )


@register_fake("combine_experts")
def _(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return x.new_empty((places.shape[0], x.shape[1]))


@cost_of("route_experts")
def _(logits: Tensor, per_token: int, *, normalized: bool = True) -> Cost:
    """Five flops an exponential; comparisons count nothing."""
    tokens, experts = logits.shape
    written = 12 * tokens * per_token + 4 * (experts + 1)
    exponentials = tokens * (per_token if normalized else experts)
    return Cost(bytes=nbytes(logits) + written, flops=5 * exponentials)


@cost_of("order_experts")
def _(chosen: Tensor, experts: int) -> Cost:
    return Cost(bytes=nbytes(chosen) + 8 * chosen.numel() + 4 * (experts + 1), flops=0)


@cost_of("combine_experts")
def _(x: Tensor, places: Tensor, weights: Tensor) -> Cost:
    """Of the most rows of x that the places can name."""
    (rows, width), tokens = x.shape, places.shape[0]
    moved = (min(rows, places.numel()) + tokens) * width * x.element_size()
    return Cost(bytes=nbytes(places, weights) + moved, flops=2 * places.numel() * width)
