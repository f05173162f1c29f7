"""What callers give to generate: prompts as text, token ids or messages, and their parameters."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Set
from typing import Any

from ridgeline.chat import Messages
from ridgeline.sampling_params import SamplingParams
from ridgeline.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids that are taken as they are."""

_MOST = 1e9  # of priorities, and of seconds
_NO_TOKENS = (bytes, bytearray, memoryview, Mapping, Set)  # though integers come out of them


def prompt_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "tolist"):  # a tensor or an array, whose elements are no Python numbers
        prompts = prompts.tolist()
    if isinstance(prompts, _NO_TOKENS) or not hasattr(prompts, "__iter__"):
        raise TypeError(f"prompts must be text, token ids, or a list of them, got {prompts!r}")
    items: list[Any] = list(prompts)
    if items and not isinstance(items[0], str) and not hasattr(items[0], "__iter__"):
        return [items]
    return items


def one_each(name: str, value: Any, count: int) -> list[Any]:
    """One value for all, or one each; numbers, or None for a deadline."""
    each: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value] * count
    whole = name == "priority"
    kinds: Any = int if whole else (int, float, type(None))
    for one in each:
        if isinstance(one, bool) or not isinstance(one, kinds):
            kind = "an integer" if whole else "a number"
            raise TypeError(f"{name} must be {kind}, or a list of them, got {one!r}")
        if one is not None and not abs(one) < _MOST:
            raise ValueError(f"{name} must be within {_MOST:g}, got {one!r}")
    if len(each) != count:
        raise ValueError(f"{name} must be one, or one for each of {count} prompts: got {len(each)}")
    return each


def params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    each: list[Any] = list(params) if isinstance(params, (list, tuple)) else [params] * count
    for one in each:
        if not isinstance(one, SamplingParams):
            raise TypeError(f"params must be SamplingParams, or a list of them, got {one!r}")
    if len(each) != count:
        raise ValueError(f"params must be one, or one for each of {count} prompts: got {len(each)}")
    return each


def tokenize(
    items: list[Prompt], tokenizer: Tokenizer | None, no_tokenizer: str
) -> list[list[int]]:
    """Token ids of each prompt. ``no_tokenizer``: why there is none."""
    texts = [item for item in items if isinstance(item, str)]
    if texts and tokenizer is None:
        raise ValueError(f"a prompt is text, but the model has no tokenizer: {no_tokenizer}")
    encoded = iter(()) if tokenizer is None else tokenizer.encode(texts)
    return [
        next(encoded) if isinstance(item, str) else _ids(item, index)
        for index, item in enumerate(items)
    ]


def chat_prompts(
    messages: Messages | Sequence[Messages],
    tokenizer: Tokenizer | None,
    no_tokenizer: str,
    **options: Any,
) -> list[list[int]]:
    """Token ids of one conversation or many; ``options`` of :meth:`ChatTemplate.render`."""
    if tokenizer is None:
        raise ValueError(f"chat needs a tokenizer: {no_tokenizer}")
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"messages must be a conversation or a list of them, got {messages!r}")
    one = bool(messages) and isinstance(messages[0], Mapping)
    conversations: Sequence[Any] = [messages] if one else messages
    return [tokenizer.encode_chat(each, **options) for each in conversations]


def _ids(item: Sequence[int], index: int) -> list[int]:
    try:
        tokens = list(item)
        kinds = set(map(type, tokens))
        if isinstance(item, _NO_TOKENS) or bool in kinds:
            raise TypeError
        ids = tokens if kinds == {int} else [token.__index__() for token in tokens]
        array("q", ids)
        return ids
    except OverflowError:
        raise ValueError(f"prompt {index}: expected token ids, got one of over 64 bits") from None
    except (TypeError, AttributeError):
        raise TypeError(
            f"prompt {index} must be text or a list of integers, got {item!r}"
        ) from None
