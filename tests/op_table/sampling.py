"""Rows of sampling. The reference draws from float64 probabilities with its own Philox."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import ridgeline
from op_table import Error, Lazy, OpCase, Sample, full, integers, normal, tensor

_MASK32 = 2**32 - 1


def philox64(seed: int, position: int) -> int:
    """The 64 random bits of a draw: Philox4x32-10 as in Salmon et al., 2011."""
    key = [seed & _MASK32, seed >> 32 & _MASK32]
    counter = [position & _MASK32, position >> 32 & _MASK32, 0, 0]
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            b >> 32 ^ counter[1] ^ key[0],
            b & _MASK32,
            a >> 32 ^ counter[3] ^ key[1],
            a & _MASK32,
        ]
        key = [(key[0] + 0x9E3779B9) & _MASK32, (key[1] + 0xBB67AE85) & _MASK32]
    return counter[1] << 32 | counter[0]


def adjusted(
    logits: Tensor,
    penalties: Tensor | None = None,
    token_counts: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Logits after penalties, bias and mask, NaN as -inf, in float64."""
    x = logits.double().clone()
    if penalties is not None and token_counts is not None:
        repetition, presence, frequency = penalties.double()[..., None].unbind(1)
        seen, in_output = token_counts > 0, token_counts // 2
        x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
        x = x - frequency * in_output - presence * (in_output > 0)
    x = x if bias is None else x + bias.double()
    x = x if mask is None else x.masked_fill(~mask, -math.inf)
    return x.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def kept_probabilities(
    x: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """Probabilities of one row after truncation, not normalised, in float64."""
    scaled = x / temperature
    weights = torch.where(x == x.max(), 1.0, (scaled - scaled.max()).exp())
    weights = torch.where(weights >= min_p, weights, 0.0)
    if 0 < top_k < len(x):
        weights = torch.where(x >= x.topk(top_k).values[-1], weights, 0.0)
    if top_p < 1:
        order = weights.argsort(descending=True)
        reached = weights[order].cumsum(0) >= top_p * weights.sum()
        last = order[int(reached.int().argmax())]
        weights = torch.where(x >= x[last], weights, 0.0)
    return weights


def _sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    logprobs: int = 0,
    **adjustments: Tensor,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    tokens = []
    for row, x in enumerate(adjusted(logits, **adjustments)):
        if bool((x == -math.inf).all()):
            tokens.append(-1)
            continue
        if temperature[row] < 1e-5:
            tokens.append(int(x.argmax()))
            continue
        weights = kept_probabilities(
            x, float(temperature[row]), int(top_k[row]), float(top_p[row]), float(min_p[row])
        )
        random = philox64(int(seeds[row]), int(positions[row])) / 2**64
        tokens.append(int((weights.cumsum(0) <= random * weights.sum()).sum()))
    chosen = torch.tensor(tokens, dtype=torch.int32)
    return (chosen, *_top_logprobs(logits, chosen.clamp(min=0), logprobs)) if logprobs else chosen


def _top_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values = adjusted(logits).log_softmax(-1)
    order = values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    ids = torch.cat((tokens.long()[:, None], order), 1)
    return values.gather(1, ids), ids.int()


def _close(reference: Tensor) -> Tensor:
    """The sum of exponentials is taken in float32, the logarithm rounded to it."""
    return 4e-6 * (1 + reference.nan_to_num(0, 0, 0).abs())


def _float32(values: list[float]) -> Lazy:
    return tensor(values, torch.float32)


def _int32(values: list[int]) -> Lazy:
    return tensor(values, torch.int32)


def _rows(count: int, vocab: int, scale: float = 3.0) -> dict[str, object]:
    """Parameters of every kind in turn, greedy first."""
    mixed = {
        "temperature": _float32([(0.0, 1.0, 0.7, 1.3)[i % 4] for i in range(count)]),
        "top_k": _int32([(0, 5, -1, 50)[i % 4] for i in range(count)]),
        "top_p": _float32([(1.0, 0.9, 0.8)[i % 3] for i in range(count)]),
        "min_p": _float32([(0.0, 0.0, 0.05)[i % 3] for i in range(count)]),
        "seeds": tensor([7 + 3 * i + (i << 40) for i in range(count)], torch.int64),
        "positions": integers(0, 1000, count),
    }
    return {"logits": normal(count, vocab, scale=scale), **mixed}


SAMPLE = OpCase(
    name="sample",
    op=ridgeline.ops.sample,
    reference=_sample,
    bound=_close,
    samples=[
        Sample("every kind of row", **_rows(12, 1000)),
        Sample(
            "a vocabulary of odd size and several tiles, logprobs", **_rows(5, 4099), logprobs=3
        ),
        Sample("a flat distribution: more tokens kept than are listed", **_rows(6, 20000, 0.3)),
        Sample(
            "penalties, bias and mask together",
            **_rows(8, 700),
            penalties=tensor([[1.2, 0.5, 0.1], [1.0, 0.0, 0.0]] * 4, torch.float32),
            token_counts=integers(0, 6, 8, 700),
            bias=normal(8, 700, dtype=torch.float32),
            mask=integers(0, 2, 8, 700).to(torch.bool),
        ),
        Sample(
            "NaN and infinities among the logits",
            **_rows(4, 64)
            | {
                "logits": normal(4, 64)
                .set((0, 3), math.nan)
                .set((1, 5), math.inf)
                .set((2, slice(0, 60)), -math.inf)
                .set((3, slice(0, 64)), math.nan)
            },
        ),
        Sample("strided rows of two", **_rows(4, 2) | {"logits": normal(8, 3)[::2, :2]}),
        Sample("one token to choose from", **_rows(4, 1)),
        Sample("no rows", **_rows(0, 16)),
    ],
    errors=[
        Error(r"logits: expected 2 dimensions", **_rows(2, 16) | {"logits": normal(16)}),
        Error(r"logits: expected a vocabulary of 1 to", **_rows(2, 0)),
        Error(r"logits: expected the last dim", **_rows(2, 16) | {"logits": normal(16, 2).t()}),
        Error(
            r"temperature: expected dtype float32", **_rows(2, 16) | {"temperature": _int32([1, 1])}
        ),
        Error(r"top_k: expected shape \[2\].*\[3\]", **_rows(2, 16) | {"top_k": _int32([1, 1, 1])}),
        Error(
            r"temperature: expected dtype float32, got Double",
            **_rows(2, 16) | {"temperature": full((2,), 1.0, dtype=torch.float64)},
        ),
        Error(r"seeds: expected dtype int64", **_rows(2, 16) | {"seeds": _int32([1, 1])}),
        Error(r"bias: expected the shape", **_rows(2, 16), bias=normal(2, 8, dtype=torch.float32)),
        Error(r"mask: expected dtype bool", **_rows(2, 16), mask=integers(0, 2, 2, 16)),
        Error(
            r"penalties, token_counts: expected both", **_rows(2, 16), penalties=full((2, 3), 1.0)
        ),
        Error(r"logprobs: expected an integer of at least 0", **_rows(2, 16), logprobs=-1),
        Error(r"logprobs: expected 0 to", **_rows(2, 16), logprobs=17),
        Error(r"temperature: expected a value in", **_rows(2, 16) | {"temperature": -1.0}),
        Error(r"top_k: expected a value in", **_rows(2, 16) | {"top_k": -2}),
        Error(r"top_p: expected a value in", **_rows(2, 16) | {"top_p": 0.0}),
        Error(r"min_p: expected a value in", **_rows(2, 16) | {"min_p": math.nan}),
    ],
)


def _sample_twice(last_tokens: Tensor, **inputs: Any) -> tuple[Tensor, ...]:
    """The tokens once more, in place of ``last_tokens``."""
    tokens = _sample(**inputs)
    assert isinstance(tokens, Tensor)
    return tokens, tokens


SAMPLE_LAST = OpCase(
    name="sample",
    op=ridgeline.ops.sample,
    reference=_sample_twice,
    bound=_close,
    mutates=("last_tokens",),
    samples=[
        Sample(
            "tokens at a second place: greedy, drawn of a list, drawn of the row",
            **_rows(12, 1000),
            last_tokens=full((12,), -7, torch.int32),
        ),
        Sample(
            "some rows of a longer one", **_rows(3, 9), last_tokens=full((8,), -7, torch.int32)[2:5]
        ),
    ],
    errors=[
        Error(r"last_tokens: expected shape \[2\]", **_rows(2, 16), last_tokens=_int32([0, 0, 0])),
        Error(
            r"last_tokens: expected dtype int32",
            **_rows(2, 16),
            last_tokens=tensor([0, 0], torch.int64),
        ),
    ],
)

TOP_LOGPROBS = OpCase(
    name="top_logprobs",
    op=ridgeline.ops.top_logprobs,
    reference=_top_logprobs,
    bound=_close,
    samples=[
        Sample("a few of many", logits=normal(3, 5000), tokens=_int32([0, 4999, 17]), count=5),
        Sample("the token alone", logits=normal(2, 100), tokens=_int32([3, 99]), count=0),
        Sample(
            "more than thread maxima bound", logits=normal(1, 2000), tokens=_int32([5]), count=600
        ),
        Sample(
            "ties beyond the list: the lowest ids, in order",
            logits=full((1, 9000), 1.0),
            tokens=_int32([8999]),
            count=4,
        ),
    ],
    errors=[
        Error(r"tokens: expected shape \[2\]", logits=normal(2, 8), tokens=_int32([1]), count=1),
        Error(
            r"count: expected 0 to.*8, got 9", logits=normal(2, 8), tokens=_int32([1, 2]), count=9
        ),
    ],
)

CASES = [SAMPLE, SAMPLE_LAST, TOP_LOGPROBS]
