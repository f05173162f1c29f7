"""Rotary embedding and the paged KV cache: rotate, write to slots, copy blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline._debug import check_ids
from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import changed_in_place, refuse_in_place
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline


def rope(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> None:
    """Rotary position embedding of queries and keys, in place, in float32.

    Args:
        q: ``[tokens, q_heads, D]``, float32, float16 or bfloat16; ``D`` contiguous, any stride of
            tokens and heads (a slice of the fused projection). Rotated in place.
        k: ``[tokens, kv_heads, D]``, as ``q``, in other memory; any number of heads. Rotated in
            place.
        positions: ``[tokens]``, int32 or int64, in ``[0, max_pos)``.
        cos_sin: ``[max_pos, rotary_dim]``, float32 or the dtype of ``q``: the first half of a row
            holds cosines, the second sines. ``rotary_dim`` is even and at most ``D`` and 256; the
            rest of a head vector stays as it is.
        interleaved: pairs are ``(2 i, 2 i + 1)`` instead of ``(i, i + rotary_dim / 2)``.

    Raises:
        ValueError: dtype, device or shape differ from the above. A position outside the table is
            an error on the CPU and under ``debug_checks()``; otherwise CUDA reads row 0 for it.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    check_ids("positions", positions, lambda: cos_sin.shape[0])
    refuse_in_place("rope", q, k, cos_sin)
    _ops.rope(q, k, positions, cos_sin, interleaved)
    changed_in_place(q, k)


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Writes keys and values of tokens to their slots of a paged cache, quantising on the way.

    Args:
        k, v: ``[tokens, kv_heads, D]``, float32, float16 or bfloat16, one dtype; ``D`` contiguous
            and at most 256, any stride of tokens and heads.
        k_cache, v_cache: ``[num_blocks, block_size, kv_heads, D]``, ``D`` contiguous, other
            strides honoured; the dtype of ``k``, float8_e4m3fn or int8. Written in place.
        slots: ``[tokens]``, int32 or int64: ``block * block_size + offset``. Several padding
            tokens may share a slot of block 0, the dummy; any other slot comes at most once.
        k_scale, v_scale: bfloat16 ``[num_blocks, block_size, kv_heads]`` for quantised caches,
            else None. A value is ``code * scale``; the scale is ``max |x| / 448`` (fp8) or
            ``/ 127`` (int8) of the head vector, rounded to bfloat16 before it is used, 0 for a
            vector of zeros, and not finite where the vector has an infinity or NaN: then all
            its values read as NaN.

    Raises:
        ValueError: dtype, device or shape differ from the above. A slot outside the cache is an
            error on the CPU and under ``debug_checks()``; otherwise CUDA writes nothing for it.
    """
    check_ids("slots", slots, lambda: k_cache.shape[0] * k_cache.shape[1])
    refuse_in_place("write_kv", k, v, k_cache, v_cache, k_scale, v_scale)
    _ops.write_kv(k, v, k_cache, v_cache, slots, k_scale, v_scale)
    changed_in_place(k_cache, v_cache, k_scale, v_scale)


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    interleaved: bool = False,
    weights_ready: bool = False,
) -> None:
    """Rotates queries in place and writes rotated keys and values to the cache, in one pass.

    The same bits as :func:`rope` followed by :func:`write_kv`, but ``k`` itself is only read:
    its rotated values exist in the cache alone.

    Args:
        q: ``[tokens, q_heads, D]``, rotated in place.
        k, v: ``[tokens, kv_heads, D]``, only read.
        positions, cos_sin, interleaved: as in :func:`rope`.
        k_cache, v_cache, slots, k_scale, v_scale: as in :func:`write_kv`; ``slots`` and
            ``positions`` have one dtype.
        weights_ready: no kernel of the stream still writes ``cos_sin``: its rows may be requested
            before the kernels ahead have ended.

    Raises:
        ValueError: as :func:`rope` and :func:`write_kv`.
    """
    check_ids("positions", positions, lambda: cos_sin.shape[0])
    check_ids("slots", slots, lambda: k_cache.shape[0] * k_cache.shape[1])
    caches = k_cache, v_cache, k_scale, v_scale
    refuse_in_place("rope_write_kv", q, k, v, cos_sin, *caches)
    _ops.rope_write_kv(
        q,
        k,
        v,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slots,
        k_scale,
        v_scale,
        interleaved,
        weights_ready,
    )
    changed_in_place(q, *caches)


def copy_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    pairs: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Copies whole cache blocks, with their scales: the copy of copy-on-write.

    Args:
        k_cache, v_cache: ``[num_blocks, block_size, kv_heads, D]``, one dtype, ``D`` contiguous.
        pairs: int32 ``[n, 2]``: source and destination block. All copies happen at once: each
            destination comes once and is no source. A pair with destination 0, the dummy block,
            is padding and does nothing.
        k_scale, v_scale: bfloat16 ``[num_blocks, block_size, kv_heads]`` of fp8 and int8 caches.

    Raises:
        ValueError: dtype, device or shape differ from the above. On the CPU also for a block
            outside the cache (CUDA: under ``debug_checks()``, otherwise the pair is skipped) and
            for a destination given twice or among the sources (CUDA: its contents are undefined).
    """
    check_ids("pairs", pairs, lambda: k_cache.shape[0])
    refuse_in_place("copy_blocks", k_cache, v_cache, k_scale, v_scale)
    _ops.copy_blocks(k_cache, v_cache, pairs, k_scale, v_scale)
    changed_in_place(k_cache, v_cache, k_scale, v_scale)


@register_fake("rope")
def _(*args: object) -> None:
    return None


@register_fake("write_kv")
def _(*args: object) -> None:
    return None


@register_fake("rope_write_kv")
def _(*args: object) -> None:
    return None


@register_fake("copy_blocks")
def _(*args: object) -> None:
    return None


def _table_bytes(tokens: int, cos_sin: Tensor) -> int:
    """Rows of the table that must be read: at most one a token."""
    return min(tokens, cos_sin.shape[0]) * cos_sin.shape[1] * cos_sin.element_size()


def _cache_bytes(k: Tensor, k_cache: Tensor, k_scale: Tensor | None) -> int:
    """Bytes that the keys, or as many values, take in the cache."""
    scales = 0 if k_scale is None else k.shape[0] * k.shape[1] * k_scale.element_size()
    return k.numel() * k_cache.element_size() + scales


@cost_of("rope")
def _(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> Cost:
    moved = 2 * nbytes(q, k) + nbytes(positions) + _table_bytes(q.shape[0], cos_sin)
    return Cost(bytes=moved, flops=3 * (q.numel() + k.numel()))


@cost_of("write_kv")
def _(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Cost:
    return Cost(bytes=nbytes(k, v, slots) + 2 * _cache_bytes(k, k_cache, k_scale), flops=0)


@cost_of("rope_write_kv")
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    interleaved: bool = False,
    weights_ready: bool = False,
) -> Cost:
    read = nbytes(q, k, v, positions, slots) + _table_bytes(q.shape[0], cos_sin)
    written = nbytes(q) + 2 * _cache_bytes(k, k_cache, k_scale)
    return Cost(bytes=read + written, flops=3 * (q.numel() + k.numel()))


@cost_of("copy_blocks")
def _(
    k_cache: Tensor,
    v_cache: Tensor,
    pairs: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Cost:
    blocks = max(k_cache.shape[0], 1)
    block = nbytes(k_cache, v_cache, k_scale, v_scale) // blocks
    return Cost(bytes=2 * pairs.shape[0] * block + nbytes(pairs), flops=0)
