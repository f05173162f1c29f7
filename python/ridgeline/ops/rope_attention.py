"""A layer's attention from what its projection leaves: rotary embedding, cache and attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline._debug import check_ids
from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import changed_in_place, refuse_in_place
from ridgeline.ops.attention import _packed, _result, _scale, _window
from ridgeline.roofline.cost import Cost, cost_of, nbytes, op_cost

_ops = torch.ops.ridgeline


def rope_paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor | None = None,
    *,
    interleaved: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    max_q: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    shared_blocks: int = 0,
    batch_invariant: bool = False,
    workspace: Tensor | None = None,
    counters: Tensor | None = None,
    weights_ready: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`rope_write_kv`, then causal :func:`paged_attention` of the rotated queries.

    The same bits in results and caches. With ``weights_ready`` one kernel on a Hopper GPU where a
    sequence alone has one query, without ``cu_q`` and ``batch_invariant``: a 16-bit cache, heads of
    64 or 128 that rotate as a whole and not interleaved, up to 16384 keys by the width of its
    table, 4 to 8 KV heads of up to 8 query heads, a float32 table, and int32 positions.

    Args:
        q: ``[T, Hq, D]``, float32, float16 or bfloat16: rotated in place, or left as it is; of no
            use afterwards.
        k, v: ``[T, Hkv, D]``, only read.
        positions, cos_sin, interleaved: as in :func:`rope`.
        slots: as in :func:`write_kv`, in the dtype of ``positions``: where the tables have the
            last keys of their sequences.
        k_cache, v_cache, block_tables, seq_lens, cu_q and the options: as in
            :func:`paged_attention`. ``seq_lens`` counts the keys written here.
        weights_ready: no kernel of the stream still writes ``cos_sin``, ``positions``, ``slots``,
            ``block_tables``, ``seq_lens`` or older keys and values.

    Returns:
        ``[T, Hq, D]`` in the dtype of q; with ``return_lse`` also lse ``[Hq, T]``.

    Raises:
        ValueError: as :func:`rope_write_kv` and :func:`paged_attention`.
    """
    if max_q is not None and max_q < 1:
        raise ValueError(f"max_q: expected None or at least 1, got {max_q}")
    check_ids("positions", positions, lambda: cos_sin.shape[0])
    check_ids("slots", slots, lambda: k_cache.shape[0] * k_cache.shape[1])
    check_ids("block_tables", block_tables, lambda: k_cache.shape[0])
    check_ids("seq_lens", seq_lens, lambda: block_tables.shape[-1] * k_cache.shape[1] + 1)
    check_ids("cu_q", cu_q, lambda: q.shape[0] + 1)
    caches = k_cache, v_cache, k_scale, v_scale
    refuse_in_place("rope_paged_attention", q, k, v, cos_sin, *caches, sinks)
    out, lse = _ops.rope_paged_attention(
        q, k, v, positions, cos_sin, slots, interleaved, k_cache, v_cache, block_tables, seq_lens,
        cu_q, max_q or 0, k_scale, v_scale, sinks, _scale(scale, q), _window(window), softcap,
        shared_blocks, batch_invariant, workspace, counters, weights_ready,
    )  # fmt: skip
    changed_in_place(q, *caches)
    return _result("rope_paged_attention", out, lse, return_lse, q)


@register_fake("rope_paged_attention")
def _(q, *rest):  # type: ignore[no-untyped-def]
    return _packed(q)


@cost_of("rope_paged_attention")
def _(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor,
    k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
    cu_q: Tensor | None = None, *, interleaved: bool = False, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, weights_ready: bool = False, **options: object,
) -> Cost:  # fmt: skip
    caches = k_cache, v_cache
    write = op_cost("rope_write_kv", q, k, v, positions, cos_sin, *caches, slots, k_scale, v_scale)
    attend = op_cost(
        "paged_attention", q, *caches, block_tables, seq_lens, cu_q, k_scale=k_scale, **options
    )
    # Rotated queries and new keys need not go to memory and back.
    fresh = nbytes(k, v) * k_cache.element_size() // k.element_size()
    once = write.bytes + attend.bytes - 2 * nbytes(q) - fresh
    return Cost(once, write.flops + attend.flops, attend.unit)
