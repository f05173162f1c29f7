"""Attention for the continuous batching of transformers: ``"paged|ridgeline"``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline import ops


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **batch: Any,
) -> tuple[Tensor, None]:
    """Attention over the cache of transformers' continuous batching (``generate_batch``).

    Layers that see every key read the cache in place, by blocks; layers with a window, whose
    blocks transformers uses in a ring, read it gathered.

    Raises:
        ValueError: called outside continuous batching.
    """
    cache = batch.get("cache")
    if cache is None:
        raise ValueError(
            '"paged|ridgeline" belongs to continuous batching (generate_batch), which passes a '
            'paged cache; use attn_implementation="ridgeline" elsewhere'
        )
    group, layer = cache.layer_index_to_group_indices[module.layer_idx]
    window = cache.sliding_windows[module.layer_idx]
    window = None if window == 1 else window  # 1 is how the cache says "none"
    kind = "full_attention" if window is None else "sliding_attention"
    cu_q, cu_k, max_k = batch["cu_seq_lens_q"], batch["cu_seq_lens_k"], batch["max_seqlen_k"]
    if isinstance(cu_k, dict):
        cu_k, max_k = cu_k[kind], max_k[kind]
    max_q, read = batch["max_seqlen_q"], batch["read_index"][group]
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "window": window,
    }
    q = query[0].transpose(0, 1)
    block = cache.block_size
    if window is None and read.numel() and block % 16 == 0 and block <= 256:
        shape = (-1, block, cache.num_key_value_heads, cache.head_dim)
        caches = cache.key_cache[layer].view(shape), cache.value_cache[layer].view(shape)
        k, v = (t[0].transpose(0, 1) for t in (key, value))
        ops.write_kv(k, v, *caches, batch["write_index"][group])
        tables, lengths = _block_tables(read, cu_k, max_k, block)
        out = ops.paged_attention(q, *caches, tables, lengths, cu_q, max_q=max_q, **options)
    else:
        k, v = cache.update(
            key_states=key,
            value_states=value,
            layer_idx=module.layer_idx,
            read_index=batch["read_index"],
            write_index=batch["write_index"],
        )
        out = ops.attention_varlen(q, k, v, cu_q, cu_k, max_q, max_k, **options)
    assert isinstance(out, Tensor)
    return out[None], None


def _block_tables(read: Tensor, cu_k: Tensor, max_k: int, block: int) -> tuple[Tensor, Tensor]:
    """Block tables and lengths from the slot of each key, kept for the step's other layers."""
    compiling = torch.compiler.is_compiling()
    kept = None if compiling else read.__dict__.get("ridgeline_tables")
    if kept is None:
        starts = torch.arange(0, max_k, block, dtype=torch.int32, device=read.device)
        slots = (cu_k[:-1, None] + starts).clamp(max=read.numel() - 1)
        kept = torch.div(read[slots], block, rounding_mode="floor").int(), cu_k.diff()
        if not compiling:
            read.__dict__["ridgeline_tables"] = kept
    return kept
