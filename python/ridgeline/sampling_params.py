"""How a request's tokens are chosen and when it ends."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral, Real

MAX_LOGPROBS = 20
_MAX_N = 2**14
_MAX_SEED = 2**63


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Choice and end of the tokens of one request. Every value is checked at construction.

    Attributes:
        n: how many outputs are sampled for the prompt; they share its computation. No more than
            the ``LLM``'s ``max_num_seqs``.
        temperature: 0 takes the most likely token (ties: the lowest id); otherwise logits are
            divided by it.
        top_k: only the k most likely tokens are candidates; 0 or -1: all.
        top_p: only the smallest set of most likely tokens with at least this probability, in
            (0, 1].
        min_p: only tokens at least this fraction as likely as the most likely one, in [0, 1].
        seed: 0 <= seed < 2**63. A request's tokens depend on its seed and their positions only,
            not on its neighbours. None: drawn from the generator that ``LLM(seed=...)`` starts.
        presence_penalty, frequency_penalty: subtracted from the logit of a token that is in the
            output already: once, and once for each time. In [-2, 2].
        repetition_penalty: divides a positive logit, multiplies a negative one, of tokens that
            are in the prompt or the output (Keskar et al., "CTRL", 2019). Above 0; 1: none.
        logit_bias: token id -> number added to its logit.
        bad_words: strings that the output must not spell: of the tokens of each, as a text begins
            with it and after a space or a full stop, the last cannot follow the others. The same
            text in other tokens, or begun by the prompt, is not seen; ``stop`` finds the former.
        max_tokens: the most tokens of an output; None: as many as the context holds.
        min_tokens: before so many tokens neither a stop token nor a stop string ends the output.
        ignore_eos: the model's end-of-sequence token does not end the output.
        stop: strings that end the output; the text stops before them.
        stop_token_ids: tokens that end the output; the token stays in ``token_ids``, its text
            is left out.
        logprobs: how many of the most likely tokens get a log-probability at each position,
            beside the sampled one; at most 20. Of the model's own distribution, before
            temperature, penalties and bias. None: no log-probabilities.
        prompt_logprobs: the same for the tokens of the prompt.
        skip_special_tokens: the text leaves special tokens out.
        detokenize: False: no text at all, and ``stop`` must be empty.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: str | Sequence[str] = ()
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "stop", _strings("stop", self.stop))
        set_field(self, "bad_words", _strings("bad_words", self.bad_words))
        set_field(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        set_field(self, "logit_bias", _bias(self.logit_bias))
        for name, low, high in (
            ("n", 1, _MAX_N),
            ("top_k", -1, None),
            ("min_tokens", 0, None),
            ("max_tokens", 1, None),
            ("seed", 0, _MAX_SEED - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            if value is not None or name in ("n", "top_k", "min_tokens"):
                set_field(self, name, _integer(name, value, low=low, high=high))
        reals: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
            ("temperature", "at least 0", lambda v: v >= 0),
            ("top_p", "in (0, 1]", lambda v: 0 < v <= 1),
            ("min_p", "in [0, 1]", lambda v: 0 <= v <= 1),
            ("presence_penalty", "in [-2, 2]", lambda v: -2 <= v <= 2),
            ("frequency_penalty", "in [-2, 2]", lambda v: -2 <= v <= 2),
            ("repetition_penalty", "above 0", lambda v: v > 0),
        )
        for name, limit, accepts in reals:
            set_field(self, name, _real(name, getattr(self, name), limit, accepts))
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop needs the text: detokenize must be True, got False")

    @property
    def has_penalties(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def check_for(self, vocab_size: int, *, has_tokenizer: bool) -> None:
        """ValueError for what a model with these cannot serve."""
        for name in ("stop_token_ids", "logit_bias"):
            if bad := [token for token in getattr(self, name) if token >= vocab_size]:
                raise ValueError(
                    f"{name}: token ids must be below the vocabulary's {vocab_size}, got {bad}"
                )
        for name, words in (("stop strings", self.stop), ("bad_words", self.bad_words)):
            if words and not has_tokenizer:
                raise ValueError(f"{name} need a tokenizer, and the model has none")


def _integer(name: str, value: object, *, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if int(value) < low or (high is not None and int(value) > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} must be {limit}, got {value}")
    return int(value)


def _real(name: str, value: object, limit: str, accepts: Callable[[float], bool]) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    # The sampler's numbers are float32, in which small ones are 0 and large ones infinite.
    number = kept = math.inf
    with suppress(OverflowError):
        number = float(value)
        (kept,) = struct.unpack("f", struct.pack("f", number))
    if not (math.isfinite(kept) and accepts(number) and accepts(kept)):
        rounded = f", in float32 {kept:g}" if accepts(number) and kept != number else ""
        raise ValueError(f"{name} must be finite and {limit}, got {value}{rounded}")
    return number


def _strings(name: str, value: object) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if values is None:
        return ()
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) for v in values):
        raise TypeError(f"{name} must be a string or a list of strings, got {value!r}")
    if "" in values:
        raise ValueError(f"{name} must not hold an empty string, got {value!r}")
    return tuple(values)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(_integer(f"each of {name}", token, low=0) for token in value)


def _bias(value: Mapping[int, float] | None) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, got {value!r}")
    return {
        _integer("each token of logit_bias", token, low=0): _real(
            f"logit_bias[{token}]", bias, "a number", lambda v: not math.isnan(v)
        )
        for token, bias in value.items()
    }
