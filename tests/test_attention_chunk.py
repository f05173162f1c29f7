"""Chunks of a prompt before many keys: on Hopper these keys are cut into segments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ridgeline
from ridgeline import ops
from test_attention import Paged, ints, normal, same

HEADS, KV_HEADS, DIM = 8, 2, 128
Q_LENS = [17, 1, 48, 5, 300, 0, 33]  # at most 512 in all: else keys are not cut
KEYS = [5003, 5200, 9001, 700, 5500, 40, 33]  # the last is a prompt's beginning
SINKS = {"sinks": torch.arange(HEADS, dtype=torch.float32) - 2}
OPTIONS: list[dict[str, Any]] = [{}, {"window": 700} | SINKS, {"softcap": 8.0, "causal": False}]


def offsets(q_lens: list[int]) -> list[int]:
    return [0, *torch.tensor(q_lens).cumsum(0).tolist()]


def on_gpu(options: dict[str, Any]) -> dict[str, Any]:
    return {name: v.cuda() if torch.is_tensor(v) else v for name, v in options.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("options", OPTIONS)
def test_chunks_beside_decodes(block: int, options: dict[str, Any]) -> None:
    """By the reference, in a workspace of NaN; the same twice, and each sequence beside one other;
    one query alone."""
    options = on_gpu(options)
    paged = Paged("cuda", KEYS, block, math.nan, DIM, KV_HEADS)
    cu_q = offsets(Q_LENS)
    q = normal("cuda", cu_q[-1] + 7, HEADS, DIM)  # and rows of no sequence
    size = ops.attention_workspace_bytes(
        len(KEYS), HEADS, KV_HEADS, DIM, max(Q_LENS), paged.tables.shape[1] * block
    )
    space = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
    out, lse = paged.run(q, cu_q, workspace=space, **options)
    assert same((out, lse), paged.run(q, cu_q, **options))
    assert not out[cu_q[-1] :].any() and (lse[:, cu_q[-1] :] == -math.inf).all()
    paged.check(q, cu_q, (out, lse), beside=40, **options)
    alone = ops.paged_attention(
        q[17:18], paged.k_cache, paged.v_cache, paged.tables[1:2], paged.seq_lens[1:2],
        return_lse=True, **options,
    )  # fmt: skip
    assert same((out[17:18], lse[:, 17:18]), alone)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dim", [64, 128])
def test_chunks_and_decodes_run_side_by_side(dim: int) -> None:
    """One query, rows of the chunk's kernel, a chunk in segments, no keys; rows of no sequence."""
    q_lens, k_lens = [1, 5, 130, 2, 1], [300, 40, 1100, 0, 90]
    q = normal("cuda", sum(q_lens) + 3, HEADS, dim)
    k, v = (normal("cuda", sum(k_lens), KV_HEADS, dim) for _ in range(2))
    bounds = ints("cuda", offsets(q_lens)), ints("cuda", offsets(k_lens)), 130, 2100
    first, again = (ops.attention_varlen(q, k, v, *bounds, return_lse=True) for _ in range(2))
    assert first[0].isfinite().all() and not first[0][-3:].any()
    assert same(first, again)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [2, 5, 6])  # 128, 25 and 42 tokens a tile
def test_layouts_agree(heads: int) -> None:
    kv_heads = 1 if heads == 5 else 2
    lengths, q_lens = [5003, 2100], [48, 176]
    paged = Paged("cuda", lengths, 64, math.nan, DIM, kv_heads)
    q = normal("cuda", sum(q_lens), heads, DIM)
    out, lse = paged.run(q, offsets(q_lens))
    packed = ops.attention_varlen(
        q, torch.cat(paged.k), torch.cat(paged.v), ints("cuda", offsets(q_lens)),
        ints("cuda", offsets(lengths)), max(q_lens), max(lengths), return_lse=True,
    )  # fmt: skip
    assert same((out, lse), packed)
    for b, (begin, end) in enumerate(zip(offsets(q_lens), offsets(q_lens)[1:])):
        dense = ops.attention(
            q[None, begin:end], paged.k[b][None], paged.v[b][None], return_lse=True
        )
        assert same((out[begin:end], lse[:, begin:end]), (dense[0][0], dense[1][0]))


@pytest.mark.gpu
def test_one_graph_serves_all_lengths() -> None:
    paged = Paged("cuda", [6000, 5000], 64, 0.0, DIM, KV_HEADS)
    q, cu_q = normal("cuda", 200, HEADS, DIM), ints("cuda", [0, 100, 200])

    def run() -> Any:
        return ops.paged_attention(
            q, paged.k_cache, paged.v_cache, paged.tables, paged.seq_lens, cu_q, max_q=200,
            return_lse=True,
        )  # fmt: skip

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for lengths, begins in (([6000, 5000], [0, 100, 200]), ([199, 3000], [0, 199, 200]),
                            ([2500, 0], [0, 17, 17])):  # fmt: skip
        paged.seq_lens.copy_(ints("cuda", lengths))
        cu_q.copy_(ints("cuda", begins))
        graph.replay()
        assert same(captured, run()), lengths


@pytest.mark.gpu
def test_explain_names_segments() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the routes of Hopper")

    def explained(q_len: int, keys: int, dim: int = DIM, **options: Any) -> Any:
        paged = Paged("cuda", [keys], 64, 0.0, dim, KV_HEADS)
        return ridgeline.explain(
            "paged_attention", normal("cuda", q_len, HEADS, dim), paged.k_cache, paged.v_cache,
            paged.tables, paged.seq_lens, ints("cuda", [0, q_len]), max_q=q_len, **options,
        )  # fmt: skip

    def segments(explanation: Any) -> bool:
        named = any("merge_chunks" in kernel.name for kernel in explanation.kernels)
        assert named == any("segments" in choice for choice in explanation.choices)
        return named

    assert segments(explained(48, 5000)) and not explained(48, 5000).slower
    assert not segments(explained(48, 1000)), "few keys"
    assert not segments(explained(600, 5000)), "many queries"
    assert not segments(explained(48, 5000, dim=256))
    assert not segments(explained(48, 5000, batch_invariant=True))
    assert not segments(explained(48, 5000, scale=-1.0))

    paged = Paged("cuda", [5000, 300], 64, 0.0, DIM, KV_HEADS)
    mixed = ridgeline.explain(
        "paged_attention", normal("cuda", 49, HEADS, DIM), paged.k_cache, paged.v_cache,
        paged.tables, paged.seq_lens, ints("cuda", [0, 48, 49]), max_q=49,
        counters=ints("cuda", [0] * (2 * KV_HEADS + 2)),
    )  # fmt: skip
    kernels = ("decode_sm90", "prefill_sm90", "merge_chunks")
    assert len(mixed.kernels) == 3
    assert all(name in kernel.name for name, kernel in zip(kernels, mixed.kernels))


def test_workspace_of_chunks_is_bounded() -> None:
    def size(batch: int, max_q: int, max_k: int = 32768) -> int:
        return ops.attention_workspace_bytes(batch, 32, 8, 128, max_q, max_k)

    few = size(1, 16)
    chunk = 16 * 32 * 129 * 4  # segments, heads, columns and lse
    decode = 32 * 8 * 8 * 130 * 4  # splits, KV heads, rows, columns and ends
    assert size(1, 17) == max(few, 17 * chunk + decode) + 16
    most = max(few, 512 * chunk + decode) + 16
    assert size(1, 512) == size(1, 8192) == most, "many queries are not cut, and few may be there"
    assert size(4, 128) == size(4, 8192) == max(4 * few, 512 * chunk + 4 * decode) + 16
    assert size(1, 8192, 1024) == size(1, 16, 1024) + 16, "few keys are not cut"
