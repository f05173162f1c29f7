"""Choosing tokens from logits."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from ridgeline._debug import check_ids
from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import changed_in_place, inference_only
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline
Sampled = Tensor | tuple[Tensor, Tensor, Tensor]
_INTEGERS: tuple[type, ...] = (numbers.Integral, torch.SymInt)
_NUMBERS: tuple[type, ...] = (numbers.Real, torch.SymInt, torch.SymFloat)


def sample(
    logits: Tensor,
    temperature: Tensor | float,
    top_k: Tensor | int,
    top_p: Tensor | float,
    min_p: Tensor | float,
    seeds: Tensor | int,
    positions: Tensor | int,
    *,
    penalties: Tensor | None = None,
    token_counts: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    logprobs: int = 0,
    last_tokens: Tensor | None = None,
) -> Sampled:
    """One token a row, a pure function of the row, its parameters, its seed and its position.

    In this order: penalties, bias, mask; a temperature of 0 then takes the largest logit, of equal
    ones the lowest id. Otherwise logits are divided by the temperature, ``min_p``, ``top_k`` and
    ``top_p`` each drop tokens of what the one before left, and one of the rest is drawn by its
    probability. Tokens whose logit equals that of the last one kept by ``top_k`` or ``top_p`` are
    kept too. The draw uses Philox4x32-10 with key ``seeds[row]`` and counter ``positions[row]``;
    probabilities are summed as integers (units of 2**-40 of the largest), so CPU and CUDA give the
    same token, alone or in any batch.

    Args:
        logits: ``[rows, vocab]``, float32, float16 or bfloat16; the last dimension contiguous,
            vocab at most 2**20. NaN counts as -inf; a row of nothing else gives -1, which is
            no token.
        temperature: float32 ``[rows]``, at least 0; below 1e-5 is 0. This one and the next five
            may be one Python number for all rows.
        top_k: int32 ``[rows]``; 0 or -1: off.
        top_p: float32 ``[rows]`` in (0, 1]; 1: off.
        min_p: float32 ``[rows]`` in [0, 1]; 0: off. The least probability, as a share of the
            most likely token's.
        seeds: int64 ``[rows]``.
        positions: int32 ``[rows]``, at least 0: the index of the drawn token in its sequence.
        penalties: float32 ``[rows, 3]``: repetition (1: none), presence, frequency (0: none), as
            vLLM defines them: repetition counts prompt and output, the others the output alone.
        token_counts: int32 ``[rows, vocab]``, given exactly with ``penalties``: twice the
            token's count in the output, plus one if it is in the prompt.
        bias: float32 ``[rows, vocab]``, added.
        mask: bool ``[rows, vocab]``; false excludes the token.
        logprobs: also the log-probabilities of the chosen and of this many most likely tokens,
            from ``logits`` as given: before penalties, bias, mask and temperature.
        last_tokens: int32 ``[rows]``, receives the tokens too: where :func:`embed` of the next
            step looks for them.

    Returns:
        int32 tokens ``[rows]``; with ``logprobs > 0`` (tokens, float32 logprobs, int32 ids), the
        last two as of :func:`top_logprobs`.

    Raises:
        ValueError: dtype, device or shape differ from the above. On the CPU, and for Python
            numbers everywhere, also a parameter outside its range; in a CUDA tensor a temperature
            below 1e-5 or NaN is greedy, a top_k below 1 and a top_p of 1 or more are off.

    Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011; Holtzman et al.,
    "The Curious Case of Neural Text Degeneration", 2020 (top-p); Nguyen et al., "Turning Up the
    Heat: Min-p Sampling", 2024.
    """
    if isinstance(logprobs, bool) or not isinstance(logprobs, int) or logprobs < 0:
        raise ValueError(f"logprobs: expected an integer of at least 0, got {logprobs!r}")
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        got = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else repr(logits)
        raise ValueError(f"logits: expected 2 dimensions, got {got}")
    vocab = logits.shape[1]
    if logprobs > vocab:
        raise ValueError(f"logprobs: expected 0 to the vocabulary's {vocab}, got {logprobs}")
    _check_number("temperature", temperature, 0.0, 3.4e38)
    _check_number("top_k", top_k, -1, 2**31 - 1)
    _check_number("top_p", top_p, 1e-45, 1.0)
    _check_number("min_p", min_p, 0.0, 1.0)
    _check_number("seeds", seeds, -(2**63), 2**63 - 1)
    _check_number("positions", positions, 0, 2**31 - 1)
    tokens = _ops.sample(
        logits,
        _per_row(temperature, torch.float32, logits),
        _per_row(top_k, torch.int32, logits),
        _per_row(top_p, torch.float32, logits),
        _per_row(min_p, torch.float32, logits),
        _per_row(seeds, torch.int64, logits),
        _per_row(positions, torch.int32, logits),
        penalties,
        token_counts,
        bias,
        mask,
        last_tokens,
    )
    changed_in_place(last_tokens)
    if not logprobs:
        return tokens
    values, ids = _ops.top_logprobs(logits, tokens.clamp(min=0), logprobs)
    return tokens, inference_only(values, "sample", logits), ids


def top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of given tokens and of each row's most likely ones: of ``log_softmax``.

    Args:
        logits: ``[rows, vocab]``, float32, float16 or bfloat16; the last dimension contiguous.
            NaN counts as -inf.
        tokens: int32 ``[rows]``.
        count: how many of the most likely tokens, 0 to vocab.

    Returns:
        float32 logprobs and int32 ids, both ``[rows, 1 + count]``: the given token first, then
        the most likely ones in falling order, of equal ones the lowest id first.

    Raises:
        ValueError: dtype, device or shape differ from the above. A token outside the vocabulary
            is an error on the CPU and under ``debug_checks()``; otherwise CUDA reads token 0.
    """
    check_ids("tokens", tokens, lambda: logits.shape[-1])
    logprobs, ids = _ops.top_logprobs(logits, tokens, count)
    return inference_only(logprobs, "top_logprobs", logits), ids


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    """Of limits that are integers the value is one too: a fraction would be cut off."""
    if isinstance(value, Tensor):
        return
    kinds = _INTEGERS if isinstance(low, int) else _NUMBERS
    of_kind = isinstance(value, kinds) and not isinstance(value, bool)
    if not of_kind:
        wanted = "integer" if isinstance(low, int) else "number"
        raise ValueError(f"{name}: expected a tensor or one {wanted}, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected a value in [{low}, {high}], got {value}")


def _per_row(value: Tensor | float, dtype: torch.dtype, logits: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.full((logits.shape[0],), value, dtype=dtype, device=logits.device)


@register_fake("sample")
def _(logits: Tensor, *args: object) -> Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int32)


@register_fake("top_logprobs")
def _(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], 1 + count)
    return (
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape, dtype=torch.int32),
    )


@cost_of("sample")
def _(
    logits: Tensor,
    *args: object,
    penalties: Tensor | None = None,
    token_counts: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    logprobs: int = 0,
    **per_row: Tensor,
) -> Cost:
    """Five flops a logit: the subtraction and the exponential that a draw needs."""
    moved = nbytes(logits, penalties, token_counts, bias, mask)
    return Cost(bytes=moved + logits.shape[0] * (32 + 8 * logprobs), flops=5 * logits.numel())


@cost_of("top_logprobs")
def _(logits: Tensor, tokens: Tensor, count: int) -> Cost:
    written = logits.shape[0] * (1 + count) * 8
    return Cost(bytes=nbytes(logits, tokens) + written, flops=5 * logits.numel())
