"""Models of transformers: ``attn_implementation="ridgeline"``, and experts by the same name.

What the ops express of attention runs on them: any GQA ratio, windows, caps, sinks, padding at
either end of a row, growing and static caches. Everything else a model may ask of it (a mask with
holes, a bias, heads that the ops do not take) is computed as transformers would, and said once in
the log.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.metadata import version
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)
from transformers.utils import logging

from ridgeline import ops
from ridgeline.integrations.decode_graphs import DecodeGraphs as DecodeGraphs
from ridgeline.integrations.key_ranges import KeyRanges
from ridgeline.integrations.own_attention import attends_itself
from ridgeline.integrations.transformers_experts import register as register_experts
from ridgeline.integrations.transformers_paged import paged_attention_forward

NAME = "ridgeline"

_logger = logging.get_logger(__name__)
_SLIDING = "sliding_window_overlay.<locals>.inner_mask"


def enable() -> None:
    """Registers "ridgeline" and "paged|ridgeline" with transformers; twice is once.

    After it ``from_pretrained(..., attn_implementation="ridgeline")`` and
    ``model.set_attn_implementation("ridgeline")`` work, and "paged|ridgeline" serves
    ``generate_batch``; ``experts_implementation`` and ``set_experts_implementation`` take
    "ridgeline" from transformers 5.5 on. No model changes until it is asked to.

    Raises:
        RuntimeError: a transformers before 5, whose masks are made otherwise.
    """
    if "q_offset" not in signature(sdpa_mask).parameters:
        raise RuntimeError(f"transformers: expected 5 or later, got {version('transformers')}")
    AttentionInterface.register(NAME, attention_forward)
    AttentionInterface.register(f"paged|{NAME}", paged_attention_forward)
    AttentionMaskInterface.register(NAME, key_ranges_mask)
    register_experts(NAME)


# ---- Masks --------------------------------------------------------------------------------------


def key_ranges_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """The mask of a step, as :class:`KeyRanges` where that says all, else as booleans.

    Padding is looked at on the host, once a step: not while a graph is traced or captured, where
    a padding mask that comes from outside stays a mask.
    """
    asked: dict[str, Any] = options | {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length,
        "q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function,
        "attention_mask": attention_mask, "local_size": local_size, "device": device,
    }  # fmt: skip
    if attends_itself(type(options.get("config")).__module__):
        if not torch.compiler.is_compiling():
            name = type(options["config"]).__name__
            _logger.warning_once(f"ridgeline: {name}: attention cannot be replaced, and stays")
        return eager_mask(**asked, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
    sliding = local_size if allow_is_causal_skip and not _has_chunks(options) else None
    pattern = _pattern(mask_function, sliding)
    # Whoever forbids to leave the mask out wants to compute with it; but one token at a time it is
    # forbidden for every cache that can be compiled, so that its graph always has one.
    computed_with = not (allow_is_causal_skip or allow_is_bidirectional_skip or q_length == 1)
    padding = _padding(attention_mask, kv_length, kv_offset)
    ranges = None
    if pattern is not None and not computed_with:
        lengths = batch_size, q_length, kv_length
        ranges = _ranges(*pattern, *lengths, q_offset, kv_offset, padding, torch.device(device))
    if ranges is None:
        return sdpa_mask(**asked, allow_is_causal_skip=False)
    if ranges.ranges is None and ranges.window is None and (ranges.causal or q_length == kv_length):
        return None
    return ranges.pack(torch.device(device))


def _has_chunks(options: dict[str, Any]) -> bool:
    """Attention in chunks names its size as windows do."""
    return getattr(options.get("config"), "attention_chunk_size", None) is not None


def _pattern(function: Any, sliding: int | None) -> tuple[bool, int | None] | None:
    """(causal, window) of a mask function of transformers; None for any other.

    Args:
        sliding: the window where nothing but a causal window has a size; read while tracing, when
            closures cannot be.
    """
    if function is causal_mask_function:
        return True, None
    if function is bidirectional_mask_function:
        return False, None
    if torch.compiler.is_compiling():
        return None if sliding is None else (True, sliding)
    cells = getattr(function, "__closure__", None)
    parts = cells[0].cell_contents if cells and len(cells) == 1 else None
    if not isinstance(parts, tuple) or len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    if getattr(parts[0], "__qualname__", "") != _SLIDING:
        return None
    return True, parts[0].__closure__[0].cell_contents


def _padding(mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """``[B, kv_length]``, true where a key counts."""
    if mask is None:
        return None
    mask = mask[:, kv_offset : kv_offset + kv_length]
    return torch.nn.functional.pad(mask, (0, kv_length - mask.shape[1]))


def _ranges(
    causal: bool,
    window: int | None,
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    padding: Tensor | None,
    device: torch.device,
) -> KeyRanges | None:
    """None where ranges do not say it: padding within a row, or not known to the host."""
    if window is not None and window >= kv_length:
        window = None
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and _is_capturing()):
        if padding is not None:
            return None
        if not isinstance(q_offset, Tensor):
            whole = not causal or q_offset + q_length - kv_offset == kv_length
            return KeyRanges(None, causal, window) if whole else None
        end = (q_offset + (q_length - kv_offset)).to(torch.int32).reshape(1)
        values = (torch.zeros_like(end), end, torch.full_like(end, q_length))
        return KeyRanges(torch.stack(values, 1).expand(batch, 3), causal, window)
    ends = int(q_offset) + q_length - kv_offset if causal else kv_length
    row = torch.tensor([[0, ends, q_length]], dtype=torch.int32, device="cpu")
    counts = row.repeat(batch, 1)
    if padding is not None:
        visible = padding[:, :ends].cpu()
        if not visible.all():
            total = visible.sum(1)
            first = visible.byte().argmax(1)
            last = ends - visible.flip(1).byte().argmax(1)
            if ((last - first != total) & (total > 0)).any():
                return None
            late = causal and bool((first + total < ends).any())
            if late and window is not None:
                return None  # a late query's window is not told from its row's other queries'
            counts[:, 0], counts[:, 1] = first, first + total
            if causal:
                counts[:, 2] = (q_length - (ends - counts[:, 1])).clamp(min=0)
            return KeyRanges(counts.to(device), causal, window, late)
    if ends == kv_length:
        return KeyRanges(None, causal, window)
    return KeyRanges(counts.to(device), causal, window)


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


# ---- Attention ----------------------------------------------------------------------------------


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention as an ``AttentionInterface`` of transformers.

    Args:
        query: ``[B, Hq, Sq, D]``. key, value: ``[B, Hkv, Sk, D]``.
        attention_mask: of :func:`key_ranges_mask`; or any of four dimensions, boolean or added.
        s_aux: ``[Hq]``, attention sinks.

    Returns:
        ``[B, Sq, Hq, D]`` and None for the weights.

    Raises:
        ValueError: dropout.
    """
    if dropout:
        raise ValueError(f"dropout: expected 0.0 (call model.eval()), got {dropout}")
    if query.dtype != value.dtype:  # autocast: rotations in float32, projections not
        query, key = query.to(value.dtype), key.to(value.dtype)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    ranges = KeyRanges(None, bool(is_causal), None)
    if attention_mask is not None and KeyRanges.is_packed(attention_mask):
        ranges = KeyRanges.unpack(attention_mask)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    reason = _reason_against(query, key, value, attention_mask, position_bias)
    if reason is not None:
        if not torch.compiler.is_compiling():
            _logger.warning_once(f"ridgeline: {type(module).__name__} not on the ops: {reason}")
        if attention_mask is None or KeyRanges.is_packed(attention_mask):
            attention_mask = ranges.mask(query.shape[2], key.shape[2], query.device)
        if s_aux is not None or softcap:
            args = (query, key, value, attention_mask, scaling, softcap, s_aux)
            return _plain_attention(*args), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, 0.0, scaling, False, position_bias
        )
    options: dict[str, Any] = {"causal": ranges.causal, "window": ranges.window}
    options |= {"softcap": softcap or 0.0, "scale": scaling, "sinks": s_aux}
    if ranges.ranges is None:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        whole = ops.attention(q, k, v, **options)
        assert isinstance(whole, Tensor)
        return whole, None
    memo = attention_mask if not torch.compiler.is_compiling() else None
    return _ranges_attention(query, key, value, ranges, options, memo), None


def _reason_against(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None
) -> str | None:
    dim = query.shape[-1]
    if bias is not None:
        return "a position bias"
    if mask is not None and not KeyRanges.is_packed(mask):
        return "a mask that is not padding at the ends of the rows"
    if value.shape[-1] != dim or dim % 8 or dim > 256:
        return f"head sizes {dim} and {value.shape[-1]}, not one multiple of 8 up to 256"
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{query.dtype}"
    return None


def _ranges_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranges: KeyRanges,
    options: dict[str, Any],
    memo: Tensor | None,
) -> Tensor:
    """Rows that see different ranges of keys, packed one after the other."""
    batch, heads, q_length, dim = query.shape
    kv_heads, kv_length = key.shape[1:3]
    # A cache is [B, Hkv, S, D]: for one token a row its heads are as good as rows of their own,
    # and nothing is copied. Each then has its part of the sinks, so they join afterwards.
    folded = q_length == 1 and batch > 1 and key.is_contiguous() and value.is_contiguous()
    rows, group = (kv_heads, heads // kv_heads) if folded else (1, heads)
    offsets = _memoised_offsets(ranges, (q_length, kv_length, rows, False), memo)
    if folded:
        q = query.reshape(batch * kv_heads, group, dim)
        k, v = (t.view(-1, 1, dim) for t in (key, value))
        sinks, options = options["sinks"], options | {"sinks": None}
    elif batch == 1:
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        sinks = None
    else:
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        sinks = None
    lengths = q_length, kv_length
    out, lse = ops.attention_varlen(q, k, v, *offsets, *lengths, return_lse=True, **options)
    if ranges.late:  # what a row's sequences leave out is zero
        offsets = _memoised_offsets(ranges, (q_length, kv_length, rows, True), memo)
        options = options | {"causal": False}
        after = ops.attention_varlen(q, k, v, *offsets, *lengths, **options)
        assert isinstance(after, Tensor)
        out = out + after
    if sinks is not None:
        by_row = lse.view(group, batch, kv_heads).permute(1, 2, 0)
        share = torch.sigmoid(by_row - sinks.float().view(kv_heads, group))
        out = out.view(batch, kv_heads, group, dim) * share.unsqueeze(-1).to(out.dtype)
    return out.view(batch, q_length, heads, dim)


def _memoised_offsets(
    ranges: KeyRanges, shape: tuple[int, int, int, bool], memo: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The offsets, kept with the mask: all layers of a step have the same."""
    if memo is None:
        return ranges.offsets(*shape)
    kept: dict[Any, tuple[Tensor, Tensor]] = memo.__dict__.setdefault("ridgeline_offsets", {})
    if shape not in kept:
        kept[shape] = ranges.offsets(*shape)
    return kept[shape]


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Any mask together with a cap or sinks, which SDPA does not have."""
    group = query.shape[1] // key.shape[1]
    scores = query.float() @ repeat_kv(key, group).float().transpose(2, 3) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    weights = torch.softmax(scores, -1).nan_to_num()[..., : key.shape[2]]
    out = weights @ repeat_kv(value, group).float()
    return out.to(query.dtype).transpose(1, 2).contiguous()
