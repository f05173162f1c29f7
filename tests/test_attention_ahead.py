"""Attention that plans while the kernel ahead runs, which may write what the plan is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline import ops
from test_attention import Paged, ints, normal, same

pytestmark = pytest.mark.gpu
BLOCK = 64


def behind_a_write(target: Tensor, call: Callable[[], Any]) -> Iterator[Any]:
    """The results of ``call`` behind a kernel that writes what ``target`` holds now, and runs for
    longer than ``call`` takes to look at it. Before that, ``target`` holds the same; something else
    for half; for all."""
    right = target.clone()
    ids = right.view(-1, 1).long()
    logits = torch.zeros(len(ids), 8192, device="cuda").scatter_(1, ids, 1e4)

    def both() -> Any:
        ops.sample(logits, 1.0, 0, 0.9, 0.0, 0, 0, last_tokens=target.view(-1))
        return call()

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = both()
    half = right.clone()
    half.view(-1)[: half.numel() // 2] = 1
    for before in (right, half, torch.zeros_like(right), right.flip(0)):
        target.copy_(before)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(target, right)
        yield result


@pytest.mark.parametrize("written", ["lengths", "tables", "queries"])
@pytest.mark.parametrize(
    "kv_heads, dim, block",
    [
        (1, 128, 64),
        (4, 128, 64),  # more blocks than SMs: they have fewer keys on their way
        (1, 128, 16),  # more copies than lanes
        (1, 64, 32),
        (1, 256, 16),
        (4, 64, 16),  # six slots of ten
    ],
)
def test_packed_rows(kv_heads: int, dim: int, block: int, written: str) -> None:
    """A block of a cluster asks for keys, by what it saw, as soon as the kernels ahead end."""
    lengths = [4097, 300, 4608, 3073, 700, 2048, 64, 4000]
    paged = Paged("cuda", lengths, block, math.nan, dim, kv_heads)
    cu_q = ints("cuda", [0, 1, 3, 4, 5, 7, 8, 9, 10])
    q = normal("cuda", 10, 32, dim)

    def run() -> Any:
        return ops.paged_attention(
            q, paged.k_cache, paged.v_cache, paged.tables, paged.seq_lens, cu_q, max_q=2,
            return_lse=True,
        )  # fmt: skip

    expected = run()
    target = {"lengths": paged.seq_lens, "tables": paged.tables, "queries": cu_q}[written]
    for result in behind_a_write(target, run):
        assert same(result, expected)


@pytest.mark.parametrize("written", ["lengths", "tables"])
@pytest.mark.parametrize("batch", [1, 5, 40])  # a cluster's; a wave of items; items dealt out
@pytest.mark.parametrize(
    "dim, cache",
    [
        (64, torch.bfloat16),
        (128, torch.bfloat16),
        (256, torch.bfloat16),  # queries do not wait in shared memory
        (128, torch.int8),  # scales come beside the tile
    ],
)
def test_decode(dim: int, cache: torch.dtype, batch: int, written: str) -> None:
    """Blocks share items out, and ask for the first tile, by the lengths and tables they saw; and
    once more if these were others."""
    lengths = [1 + 797 * (b + 2) % 3800 for b in range(batch)]
    paged = Paged("cuda", lengths, BLOCK, math.nan, dim, kv_heads=8)
    options: dict[str, Any] = {}
    if cache == torch.int8:
        shape = paged.k_cache.shape
        draw = torch.Generator().manual_seed(dim)
        paged.k_cache, paged.v_cache = (
            torch.randint(-128, 128, shape, generator=draw).to("cuda", cache) for _ in range(2)
        )
        options = {
            name: torch.rand(shape[:3], generator=draw).to("cuda", torch.bfloat16) / 32
            for name in ("k_scale", "v_scale")
        }
    q = normal("cuda", batch, 32, dim)
    counters = torch.zeros(8 * batch + 2, dtype=torch.int32, device="cuda")
    expected = paged.run(q, counters=counters, **options)
    target = {"lengths": paged.seq_lens, "tables": paged.tables}[written]
    for result in behind_a_write(target, lambda: paged.run(q, counters=counters, **options)):
        assert same(result, expected)
        assert not counters.any()
