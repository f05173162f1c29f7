"""Many rows a KV head: on Hopper the splits of up to 4608 keys are joined in clusters of blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

import ridgeline
from ridgeline import ops
from test_attention import Paged, ints, normal, same

BLOCK = 64
LENGTHS = [4097, 0, 1, 512, 513, 3073, 4608, 3072, 3584]  # up to seven splits, whole and not
WINDOW = {"window": 700, "softcap": 8.0}
TILES: list[tuple[int, dict[str, Any]]] = [
    (64, WINDOW), (96, {"causal": False}), (128, {}), (128, WINDOW), (256, {}),
]  # fmt: skip
SHAPES = [  # query heads, KV heads, queries a sequence
    (32, 1, 1),
    (64, 1, 1),  # as many rows as a tile has
    (22, 2, 1),  # an odd number
    (8, 2, 5),  # several queries
]


def explained(paged: Paged, q: torch.Tensor, q_len: int) -> Any:
    cu_q = [q_len * b for b in range(len(paged.lengths) + 1)]
    return ridgeline.explain(
        "paged_attention", q, paged.k_cache, paged.v_cache, paged.tables, paged.seq_lens,
        ints("cuda", cu_q), max_q=q_len,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kv_heads, q_len", SHAPES)
@pytest.mark.parametrize("dim, options", TILES)
def test_clusters(heads: int, kv_heads: int, q_len: int, dim: int, options: dict[str, Any]) -> None:
    """By the reference, with sinks and in a workspace of NaN; the same bits alone, and where the
    table has room for more keys than a cluster takes, so that a second kernel joins the splits."""
    paged = Paged("cuda", LENGTHS, BLOCK, math.nan, dim, kv_heads)
    cu_q = [q_len * b for b in range(len(LENGTHS) + 1)]
    q = normal("cuda", cu_q[-1], heads, dim)
    options = options | {"sinks": torch.arange(heads, dtype=torch.float32, device="cuda") / 8 - 2}
    width = paged.tables.shape[1]
    size = ops.attention_workspace_bytes(len(LENGTHS), heads, kv_heads, dim, q_len, width * BLOCK)
    space = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
    out, lse = paged.run(q, cu_q, workspace=space, **options)
    paged.check(q, cu_q, (out, lse), **options)
    paged.tables = pad(paged.tables, (0, 1))
    assert same((out, lse), paged.run(q, cu_q, **options)), "joined by a kernel of its own"


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [11, 32, 64])
@pytest.mark.parametrize("cluster", [2, 3, 4, 5, 6])
def test_smaller_clusters(cluster: int, heads: int) -> None:
    """Each block joins an equal share of the rows, or none, of as many splits as there are."""
    lengths = [512 * cluster, 512 * cluster - 511, 300, 0, 513]
    paged = Paged("cuda", lengths, BLOCK, math.nan, 128, kv_heads=1)
    q = normal("cuda", len(lengths), heads, 128)
    cu_q = list(range(len(lengths) + 1))
    out, lse = paged.run(q, cu_q)
    paged.check(q, cu_q, (out, lse))
    paged.tables = pad(paged.tables, (0, 80))
    assert same((out, lse), paged.run(q, cu_q)), "joined by a kernel of its own"


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_more_sequences_than_clusters_at_once(dim: int) -> None:
    """No bit differs, whether a second kernel joins the splits, clusters follow each other, or
    blocks of a cluster share SMs or do not."""
    lengths = [1 + 797 * b % 4600 for b in range(140)]
    paged = Paged("cuda", lengths, BLOCK, math.nan, dim, kv_heads=1)
    q = normal("cuda", len(lengths), 32, dim)
    out, lse = paged.run(q)
    for begin, end in ((0, 20), (20, 21), (21, 38), (38, 70), (70, 140)):
        few = slice(begin, end)
        part = ops.paged_attention(
            q[few], paged.k_cache, paged.v_cache, paged.tables[few], paged.seq_lens[few],
            return_lse=True,
        )  # fmt: skip
        assert same((out[few], lse[:, few]), part)


@pytest.mark.gpu
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("batch, longest", [(140, 4600), (300, 700), (300, 60), (40, 9000)])
def test_items_are_dealt(batch: int, longest: int, invariant: bool) -> None:
    """With counters, as blocks become free; no bit differs, and zeros are left behind. 300 of up to
    700 keys are joined in clusters instead, and 40 that are not cut are an item a block."""
    lengths = [797 * b % longest for b in range(batch)]
    paged = Paged("cuda", lengths, BLOCK, math.nan, 128, kv_heads=2)
    q = normal("cuda", batch, 32, 128)
    counters = torch.zeros(2 * batch + 2, dtype=torch.int32, device="cuda")
    expected = paged.run(q, batch_invariant=invariant)
    for _ in range(3):
        assert same(paged.run(q, batch_invariant=invariant, counters=counters), expected)
        assert not counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dim, cluster", [(64, 6), (128, 7), (256, 6)])
def test_explain_tells_of_clusters(dim: int, cluster: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the routes of Hopper")
    paged = Paged("cuda", [4096, 5], BLOCK, dim=dim, kv_heads=1)
    q = normal("cuda", 2, 32, dim)
    clusters = explained(paged, q, 1)
    assert len(clusters.kernels) == 1 and f"clusters of {cluster}" in clusters.choices[0]
    paged.tables = pad(paged.tables, (0, 9))
    general = explained(paged, q, 1)
    assert len(general.kernels) == 2 and "clusters" not in general.choices[0]


@pytest.mark.gpu
def test_explain_tells_of_clusters_that_follow_each_other() -> None:
    """Of short tables, however many sequences; not where a prompt leaves most to other kernels."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the routes of Hopper")
    paged = Paged("cuda", [2048, *[5] * 139], BLOCK, dim=128, kv_heads=1)
    q = normal("cuda", 739, 32, 128)
    assert "clusters of 4" in explained(paged, q[:140], 1).choices[0]
    cu_q = ints("cuda", [0, *range(600, 740)])
    mixed = ridgeline.explain(
        "paged_attention", q, paged.k_cache, paged.v_cache, paged.tables, paged.seq_lens, cu_q,
        max_q=600,
    )  # fmt: skip
    assert any("splits of 512" in choice for choice in mixed.choices)
    assert not any("clusters" in choice for choice in mixed.choices)
