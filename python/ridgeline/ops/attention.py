"""Attention over contiguous, packed and paged keys and values, and the merge of partial results.

Options shared by the three attention ops:
    causal: a query sees the keys up to its own position. The last query stands at the last key
        (bottom-right alignment), so query i of a sequence is at ``k_len - q_len + i``.
    scale: multiplies the scores; None: ``1 / sqrt(D)``.
    window: the query at position p sees keys ``p - window + 1 … p``; None: all. Needs ``causal``.
    softcap: scores become ``softcap * tanh(score / softcap)``; 0: unchanged.
    sinks: ``[Hq]``, the dtype of q or float32: a logit a query head that joins the softmax's sum
        without a value (the attention sinks of gpt-oss).
    return_lse: also return the natural logarithm of the sum of the exponentials, sinks included,
        float32, ``[B, Hq, Sq]`` or packed ``[Hq, T]``.

A query that sees no key gives zeros, and lse -inf (its sink where there is one). Any number of
query heads that is a multiple of the KV heads; D a multiple of 8 up to 256. Scores, softmax and
sums are float32. On CUDA rows must start at multiples of 16 bytes (8 for one-byte caches).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ridgeline._debug import check_ids
from ridgeline.ops._fake import register_fake
from ridgeline.ops._gradient import inference_only
from ridgeline.roofline.cost import Cost, cost_of, nbytes

_ops = torch.ops.ridgeline


def _scale(scale: float | None, q: Tensor) -> float:
    if scale is not None:
        return scale
    head_dim = q.shape[-1] if q.dim() else 0
    return 1.0 / math.sqrt(head_dim) if head_dim else 0.0  # no size at all is refused later


def _window(window: int | None) -> int:
    if window is None:
        return 0
    if isinstance(window, (bool, float, str)) or window < 1:
        raise ValueError(f"window: expected None or an integer from 1 on, got {window!r}")
    return window


def _result(
    name: str, out: Tensor, lse: Tensor, return_lse: bool, *inputs: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    out = inference_only(out, name, *inputs)
    return (out, inference_only(lse, name, *inputs)) if return_lse else out


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a batch of equally long sequences.

    Args:
        q: ``[B, Sq, Hq, D]``, float32, float16 or bfloat16; any strides, last dimension contiguous.
        k, v: ``[B, Sk, Hkv, D]``, dtype of q.
        causal, scale, window, softcap, sinks, return_lse: see the module.

    Returns:
        ``[B, Sq, Hq, D]``, new and contiguous; with ``return_lse`` also lse ``[B, Hq, Sq]``.

    Raises:
        ValueError: shape, dtype, stride or option not as above; the message names the argument.

    Source: Dao, "FlashAttention-2", 2023; Milakov and Gimelshein, "Online normalizer calculation
    for softmax", 2018.
    """
    out, lse = _ops.attention(q, k, v, sinks, causal, _scale(scale, q), _window(window), softcap)
    return _result("attention", out, lse, return_lse, q, k, v, sinks)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of sequences packed one after the other.

    Args:
        q: ``[Tq, Hq, D]``; sequence b owns rows ``cu_q[b] … cu_q[b + 1] - 1``. Rows of no sequence
            become zero.
        k, v: ``[Tk, Hkv, D]``, split by ``cu_k``.
        cu_q, cu_k: int32 ``[B + 1]``, ascending.
        max_q, max_k: upper bounds of the lengths; longer sequences are an error on the CPU and cut
            on CUDA.
        causal, scale, window, softcap, sinks, return_lse: see the module.

    Returns:
        ``[Tq, Hq, D]``; with ``return_lse`` also lse ``[Hq, Tq]``.

    Raises:
        ValueError: as :func:`attention`; offsets that descend or pass the end (CPU, debug checks).
    """
    check_ids("cu_q", cu_q, lambda: q.shape[0] + 1)
    check_ids("cu_k", cu_k, lambda: k.shape[0] + 1)
    out, lse = _ops.attention_varlen(
        q, k, v, cu_q, cu_k, max_q, max_k, sinks, causal, _scale(scale, q), _window(window), softcap
    )
    return _result("attention_varlen", out, lse, return_lse, q, k, v, sinks)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_q: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    max_q: int | None = None,
    k_start: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    shared_blocks: int = 0,
    batch_invariant: bool = False,
    plan: None = None,
    workspace: Tensor | None = None,
    counters: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a paged KV cache: decode, prefill chunks, mixed batches, draft verification.

    Args:
        q: ``[T, Hq, D]``, float32, float16 or bfloat16, or float8_e4m3fn with ``q_scale``. Rows of
            no sequence become zero.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D]``, strides honoured, last dimension
            contiguous; dtype of the result, or float8_e4m3fn or int8 with scales. ``block_size`` a
            multiple of 16 from 16 to 256. Slots past a sequence's length may hold anything.
        block_tables: int32 ``[B, max_blocks]``. seq_lens: int32 ``[B]``, keys including the new
            ones, which are written already.
        cu_q: int32 ``[B + 1]``, offsets of each sequence's queries; None: one query a sequence.
        max_q: upper bound of the queries a sequence; None: the rows of q, which launches more than
            is needed.
        k_start: int32 ``[B]``, the first visible key (left padding); None: 0.
        q_scale: float32 ``[T, Hq]``, none negative, of q in float8_e4m3fn; the result is then
            bfloat16. On a Hopper GPU many queries (heads up to 128, an fp8 cache) are multiplied in
            fp8: a weight times its value's scale is rounded by 2^-4 of itself, or, where that is
            more, by 2^-15 of the row's largest weight times the sequence's largest scale of values.
            Elsewhere q is first rounded to bfloat16 (``explain`` tells).
        k_scale, v_scale: bfloat16 ``[num_blocks, block_size, Hkv]`` of a quantised cache.
        shared_blocks: how many leading blocks of their tables all sequences have in common, as
            the first row names them. CUDA reads at least 512 such keys once for all sequences, if
            these bring few queries and nothing is in the way (``explain`` tells); the result then
            differs by rounding.
        batch_invariant: a row's bits do not depend on how many queries its sequence brings in
            this call (a chunk, a whole prompt, one token); decode of few long sequences then runs
            slower on CUDA, where keys are not split. Nor do they depend on the other sequences.
        plan: must be None (the work is cut from shapes and from the lengths on the device).
        workspace: uint8, any contents, at least :func:`attention_workspace_bytes`; None: allocated.
        counters: int32, at least ``B * Hkv + 2``, zero on entry and on exit, one set a stream: the
            splits of a decode are then joined in the same launch, and those of several queries
            dealt to blocks as these become free. None: a decode takes one kernel more.
        causal, scale, window, softcap, sinks, return_lse: see the module.

    Returns:
        ``[T, Hq, D]`` in the dtype of q (bfloat16 where that is fp8); with ``return_lse`` also lse
        ``[Hq, T]``.

    Raises:
        ValueError: as :func:`attention`; ids outside the cache and lengths past the table on the
            CPU and under ``debug_checks()``. Otherwise CUDA reads block 0 and clamps.

    Source: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023;
    Dao et al., "Flash-Decoding", 2023.
    """
    if plan is not None:
        raise ValueError(f"plan: expected None, got {type(plan).__name__}")
    if max_q is not None and max_q < 1:
        raise ValueError(f"max_q: expected None or at least 1, got {max_q}")
    check_ids("block_tables", block_tables, lambda: k_cache.shape[0])
    check_ids("seq_lens", seq_lens, lambda: block_tables.shape[-1] * k_cache.shape[1] + 1)
    check_ids("cu_q", cu_q, lambda: q.shape[0] + 1)
    out, lse = _ops.paged_attention(
        q, k_cache, v_cache, block_tables, seq_lens, cu_q, max_q or 0, k_start, q_scale,
        k_scale, v_scale, sinks, causal, _scale(scale, q), _window(window), softcap, shared_blocks,
        batch_invariant, workspace, counters,
    )  # fmt: skip
    caches = k_cache, v_cache, k_scale, v_scale
    return _result("paged_attention", out, lse, return_lse, q, q_scale, *caches, sinks)


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Joins two attentions of the same queries over disjoint keys.

    Args:
        out_a, out_b: ``[B, Sq, H, D]`` or packed ``[T, H, D]``, contiguous, one dtype; on CUDA in
            pieces of 16 bytes.
        lse_a, lse_b: float32 ``[B, H, Sq]`` or ``[H, T]``, contiguous. A side with lse -inf does
            not count, whatever its out holds.

    Returns:
        ``(out, lse)`` of the union of the keys, shaped like the inputs.

    Raises:
        ValueError: shape, dtype or stride not as above.
    """
    out, lse = _ops.merge_attention(out_a, lse_a, out_b, lse_b)
    joined = _result("merge_attention", out, lse, True, out_a, lse_a, out_b, lse_b)
    assert isinstance(joined, tuple)
    return joined


def attention_workspace_bytes(
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_q: int,
    max_k: int,
    kv_bytes: int = 2,
    shared_keys: int = 0,
    quantised_rows: int = 0,
) -> int:
    """Bytes of workspace that :func:`paged_attention` needs on CUDA for float16 and bfloat16.

    Of at most ``batch * max_q`` rows of q.

    Args:
        max_q: the op's ``max_q``. max_k: ``block_tables.shape[1] * block_size``.
        kv_bytes: of an element of the caches. shared_keys: ``shared_blocks * block_size``.
        quantised_rows: the rows of q where it is quantised, else 0.
    """
    return _ops.attention_workspace(
        batch, heads, kv_heads, head_dim, max_q, max_k, kv_bytes, shared_keys, quantised_rows
    )


def _packed(q: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = torch.empty_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@register_fake("attention")
def _(q, k, v, sinks, causal, scale, window, softcap):  # type: ignore[no-untyped-def]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


@register_fake("attention_varlen")
def _(q, *rest):  # type: ignore[no-untyped-def]
    return _packed(q)


@register_fake("paged_attention")
def _(q, *rest):  # type: ignore[no-untyped-def]
    return _packed(q)


@register_fake("merge_attention")
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out_a), torch.empty_like(lse_a)


def _pairs(q_len: int, k_len: int, causal: bool, window: int | None) -> int:
    """Visible (query, key) pairs of one sequence and head."""
    if not causal:
        return q_len * k_len
    pairs = 0
    for end, sign in ((k_len, 1), (max(k_len - q_len, 0), -1)):  # of all positions before it
        rising = min(end, window) if window else end
        pairs += sign * (rising * (rising + 1) // 2 + (end - rising) * rising)
    return pairs


def _keys(q_len: int, k_len: int, window: int | None) -> int:
    """Keys of one sequence that any query sees."""
    return (min(k_len, window + q_len - 1) if window else k_len) if q_len else 0


def _unit(q: Tensor) -> str:
    return {torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}.get(q.dtype, "bf16")


@cost_of("attention")
def _(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, window: int | None = None,
      **options: object) -> Cost:  # fmt: skip
    batch, q_len, heads, dim = q.shape
    pairs = _pairs(q_len, k.shape[1], causal, window)
    read = 2 * batch * _keys(q_len, k.shape[1], window) * k.shape[2] * dim * k.itemsize
    return Cost(2 * nbytes(q) + read, 4 * batch * heads * dim * pairs, _unit(q))


@cost_of("attention_varlen")
def _(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *,
      causal: bool = True, window: int | None = None, **options: object) -> Cost:  # fmt: skip
    lengths = list(zip(cu_q.diff().tolist(), cu_k.diff().tolist()))
    pairs = sum(_pairs(q_len, k_len, causal, window) for q_len, k_len in lengths)
    keys = sum(_keys(q_len, k_len, window) for q_len, k_len in lengths)
    read = 2 * keys * k.shape[1] * k.shape[2] * k.itemsize
    return Cost(2 * nbytes(q) + read, 4 * q.shape[1] * q.shape[2] * pairs, _unit(q))


@cost_of("paged_attention")
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
      cu_q: Tensor | None = None, *, causal: bool = True, window: int | None = None,
      k_start: Tensor | None = None, q_scale: Tensor | None = None, k_scale: Tensor | None = None,
      shared_blocks: int = 0, **options: object) -> Cost:  # fmt: skip
    """Keys that no query of a sequence sees are not counted, and shared ones once."""
    starts = [0] * len(seq_lens) if k_start is None else k_start.tolist()
    k_lens = [max(n - start, 0) for n, start in zip(seq_lens.tolist(), starts)]
    q_lens = [1] * len(k_lens) if cu_q is None else cu_q.diff().tolist()
    pairs = sum(_pairs(q_len, k_len, causal, window) for q_len, k_len in zip(q_lens, k_lens))
    shared = 0 if window or any(starts) else shared_blocks * k_cache.shape[1]
    seen = [_keys(q_len, k_len, window) for q_len, k_len in zip(q_lens, k_lens)]
    keys = min(shared, max(seen, default=0)) + sum(max(n - shared, 0) for n in seen)
    scale_bytes = 0 if k_scale is None else k_scale.element_size()
    row = k_cache.shape[2] * (k_cache.shape[3] * k_cache.element_size() + scale_bytes)
    moved = nbytes(q, q_scale, block_tables, seq_lens) + q.numel() * max(q.element_size(), 2)
    return Cost(moved + 2 * keys * row, 4 * q.shape[1] * q.shape[2] * pairs, _unit(q))


@cost_of("merge_attention")
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Cost:
    return Cost(3 * nbytes(out_a) + 3 * nbytes(lse_a), 3 * out_a.numel())
