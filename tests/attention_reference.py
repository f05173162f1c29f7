"""Attention by its definition, in the dtype of its inputs: float64 makes it the reference."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def visible(q_len: int, k_len: int, causal: bool, window: int | None, start: int) -> Tensor:
    """[q_len, k_len]: what each query sees."""
    position = torch.arange(q_len)[:, None] + k_len - q_len
    key = torch.arange(k_len)[None, :]
    mask = key >= start
    if causal:
        mask = mask & (key <= position)
    if window is not None:
        mask = mask & (key > position - window)
    return mask.expand(q_len, k_len)


def one_sequence(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None,
    window: int | None = None, softcap: float = 0.0, sinks: Tensor | None = None, start: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[Sq, Hq, D] and [Sk, Hkv, D] to out and lse [Hq, Sq], in the dtype of q, by the definition.

    A value that no query sees does not count, whatever it holds.
    """
    group = q.shape[1] // k.shape[1]
    mask = visible(q.shape[0], k.shape[0], causal, window, start).to(q.device)
    seen = mask.any(0)[:, None, None]
    k, v = (torch.where(seen, t, 0).repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, column], -1)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    lse = wide.logsumexp(-1) if wide.shape[-1] else wide.new_full(wide.shape[:-1], -math.inf)
    weights = torch.where(lse[..., None] == -math.inf, 0, (wide - lse[..., None]).exp())
    out = weights[..., : k.shape[1]].to(q.dtype) @ v
    return out.transpose(0, 1), lse


def attention(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = True, **options: Any) -> Any:
    if q.shape[0] == 0:
        return q.clone(), q.new_empty(0, q.shape[2], q.shape[1])
    parts = [one_sequence(*row, **options) for row in zip(q, k, v)]
    return tuple(torch.stack(part) for part in zip(*parts))


def _packed(q: Tensor, cu_q: list[int], parts: list[tuple[Tensor, Tensor]]) -> Any:
    """Rows of no sequence are zero, with lse -inf."""
    out = torch.zeros_like(q)
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=wide, device=q.device)
    for begin, end, (part, part_lse) in zip(cu_q, cu_q[1:], parts):
        out[begin:end] = part
        lse[:, begin:end] = part_lse
    return out, lse


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    return_lse: bool = True, **options: Any,
) -> Any:  # fmt: skip
    qs, ks = cu_q.tolist(), cu_k.tolist()
    parts = [
        one_sequence(q[qs[b] : qs[b + 1]], k[ks[b] : ks[b + 1]], v[ks[b] : ks[b + 1]], **options)
        for b in range(len(qs) - 1)
    ]
    return _packed(q, qs, parts)


def _gather(
    cache: Tensor, scale: Tensor | None, table: Tensor, length: int, dtype: torch.dtype
) -> Tensor:
    """The first `length` rows of one sequence, dequantised."""
    values = cache[table.long()].flatten(0, 1)[:length].to(dtype)
    if scale is None:
        return values
    return values * scale[table.long()].flatten(0, 1)[:length, :, None].to(dtype)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
    cu_q: Tensor | None = None, k_start: Tensor | None = None, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, max_q: int | None = None, return_lse: bool = True,
    shared_blocks: int = 0, q_scale: Tensor | None = None, **options: Any,
) -> Any:  # fmt: skip
    if q_scale is not None:
        wide = q.dtype if q.dtype == torch.float64 else torch.bfloat16
        q = (q.to(q_scale.dtype) * q_scale[..., None]).to(wide)
    offsets = list(range(len(seq_lens) + 1)) if cu_q is None else cu_q.tolist()
    parts = []
    for b, length in enumerate(seq_lens.tolist()):
        k = _gather(k_cache, k_scale, block_tables[b], length, q.dtype)
        v = _gather(v_cache, v_scale, block_tables[b], length, q.dtype)
        start = 0 if k_start is None else int(k_start[b])
        parts.append(one_sequence(q[offsets[b] : offsets[b + 1]], k, v, start=start, **options))
    return _packed(q, offsets, parts)


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> Any:
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros_like(out_a)
    for side, side_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = torch.where(side_lse == -math.inf, 0, (side_lse - lse).exp()).transpose(-1, -2)
        out = out + torch.where(weight[..., None] == 0, 0, weight[..., None] * side.to(lse.dtype))
    return out.to(out_a.dtype), lse
