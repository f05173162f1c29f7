"""The row of rope_paged_attention: the rows of its two parts, one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import attention_reference as reference
import ridgeline
from op_table import Error, OpCase, Sample, normal, tensor
from op_table.attention import PagedCase
from op_table.kv_cache import _rope_write_kv, cos_sin


def _rope_paged_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, slots: Tensor,
    k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, seq_lens: Tensor,
    cu_q: Tensor | None = None, interleaved: bool = False, weights_ready: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    q, k_cache, v_cache = _rope_write_kv(
        q, k, v, positions, cos_sin, k_cache, v_cache, slots, interleaved
    )
    caches = k_cache, v_cache
    out, lse = reference.paged_attention(q, *caches, block_tables, seq_lens, cu_q, **options)
    return out, lse, q, *caches


def _inputs(case: PagedCase, **options: Any) -> dict[str, Any]:
    """The last keys of each sequence, as many as it brings queries, are written by the call."""
    q_lens = case.q_lens or [1] * len(case.lengths)
    last = [
        (table, length - count + i)
        for table, length, count in zip(case.tables.tolist(), case.lengths, q_lens)
        for i in range(count)
    ]
    slots = [table[n // case.block] * case.block + n % case.block for table, n in last]
    rows = len(last), case.kv_heads, case.dim
    found = {
        "k": normal(*rows),
        "v": normal(*rows),
        "positions": tensor([n for _, n in last], torch.int32),
        "slots": tensor(slots, torch.int32),
        "cos_sin": cos_sin(1024, case.dim),
    }
    return case.inputs() | found | options


ROPE_PAGED_ATTENTION = OpCase(
    name="rope_paged_attention",
    op=ridgeline.ops.rope_paged_attention,
    reference=_rope_paged_attention,
    competitor=_rope_paged_attention,
    mutates=("q", "k_cache", "v_cache"),
    samples=[
        Sample("decode at the edges of a block", **_inputs(PagedCase([1, 15, 16, 17, 65]))),
        Sample("prefill, decode and a chunk, part of a head rotated",
               **_inputs(PagedCase([40, 77, 65], q_lens=[40, 1, 5]), cos_sin=cos_sin(128, 32))),
        Sample("neighbours rotated, a window, a softcap",
               **_inputs(PagedCase([70, 20]), interleaved=True, window=20, softcap=4.0)),
    ],
    errors=[
        Error(r"slots: expected shape \[1\]",
              **_inputs(PagedCase([20]), slots=tensor([3, 4], torch.int32))),
        Error(r"v: expected the shape of k", **_inputs(PagedCase([20]), v=normal(1, 3, 64))),
        Error(r"block_tables: expected shape",
              **_inputs(PagedCase([20]), block_tables=tensor([[1, 2], [3, 4]], torch.int32))),
        Error(r"max_q: expected None or at least 1", **_inputs(PagedCase([20]), max_q=0)),
    ],
)  # fmt: skip

CASES = [ROPE_PAGED_ATTENTION]
