"""Contents of the embedding's ids, and ids that the kernel ahead writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ridgeline
from ridgeline import ops

WEIGHT = torch.arange(1, 5).float()[:, None].repeat(1, 8)


def inputs(device: str, **changed: list[int]) -> dict[str, Any]:
    named = {"ids": [3, -2, 1], "last_tokens": [0, 2], "positions": [0, 1, 1]} | changed
    arrays: dict[str, Tensor] = {
        name: torch.tensor(values, dtype=torch.int32, device=device)
        for name, values in named.items()
    }
    weight = WEIGHT.to(device)
    return {"weight": weight, "position_weight": 10 * weight[:2], **arrays}


OUTSIDE = [
    ("ids", [3, 4, 1], r"ids: expected values in \[-2, 4\), got 4 at 1"),
    ("ids", [3, 0, -3], r"ids: expected values in \[-2, 4\), got -3 at 2"),
    ("positions", [0, 1, 2], r"positions: expected values in \[0, 2\), got 2 at 2"),
    ("positions", [-1, 1, 1], r"positions: expected values in \[0, 2\), got -1 at 0"),
]


@pytest.mark.parametrize(
    "name, values, message",
    [*OUTSIDE, ("last_tokens", [0, 4], r"last_tokens: expected values in \[0, 4\), got 4 at 1")],
)
def test_contents_are_checked_on_the_cpu(name: str, values: list[int], message: str):
    with pytest.raises(ValueError, match=message):
        ops.embed(**inputs("cpu", **{name: values}))


def test_a_last_token_that_no_id_stands_for_may_be_anything():
    out = ops.embed(**inputs("cpu", last_tokens=[-9, 2]))
    assert torch.equal(out[:, 0], torch.tensor([4.0 + 10, 3 + 20, 2 + 20]))


def test_negative_ids_need_last_tokens():
    given = inputs("cpu") | {"last_tokens": None}
    with pytest.raises(ValueError, match=r"ids: expected values in \[0, 4\), got -2 at 1"):
        ops.embed(**given)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_step_is_rounded(device: str, dtype: torch.dtype):
    """As separate operations of PyTorch, to the bit."""
    torch.manual_seed(2)
    weight, table = torch.randn(2, 50, 72, device=device).to(dtype)
    ids, positions = torch.randint(0, 50, (2, 40), device=device)
    out = ops.embed(ids, weight, scale=0.3, positions=positions, position_weight=table)
    assert torch.equal(out, weight[ids] * 0.3 + table[positions])


@pytest.mark.gpu
@pytest.mark.parametrize("name, values, message", OUTSIDE)
def test_cuda_checks_on_request_and_reads_row_0_otherwise(
    name: str, values: list[int], message: str
):
    given = inputs("cuda", **{name: values})
    with ridgeline.debug_checks(), pytest.raises(ValueError, match=message):
        ops.embed(**given)
    top = {"ids": 4, "positions": 2}[name]
    low = {"ids": -2, "positions": 0}[name]
    mended = [value if low <= value < top else 0 for value in values]
    assert torch.equal(ops.embed(**given), ops.embed(**inputs("cuda", **{name: mended})))


@pytest.mark.gpu
def test_who_waits_for_it_waits_for_the_kernels_ahead():
    """It reads before they end, but ends after them."""
    rows, width = 64, 8192
    weight = torch.randn(2 * width, width, device="cuda", dtype=torch.bfloat16) / 64
    xs = torch.randn(8, rows, width, device="cuda", dtype=torch.bfloat16)
    ids = torch.arange(rows, dtype=torch.int32, device="cuda").flip(0)

    def steps() -> list[Tensor]:
        out = []
        for x in xs:
            y = ops.linear(x, weight)
            ops.embed(ids, x, inputs_ready=True)
            out.append(ops.embed(ids, y))
            y.fill_(float("nan"))
        return out

    expected = steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = steps()
    for _ in range(3):
        graph.replay()
        for one, other in zip(results, expected, strict=True):
            assert torch.equal(one, other) and not one.isnan().any()


@pytest.mark.gpu
def test_waits_for_the_tokens_that_the_kernel_ahead_writes():
    """A graph of samples and embeddings in turn: each reads what the one before has chosen."""
    vocab, width, rows = 32768, 512, 4
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16)
    logits = torch.randn(8, rows, vocab, device="cuda")
    last = torch.zeros(rows, dtype=torch.int32, device="cuda")
    ids = torch.tensor([-1, -3, 7, -4], dtype=torch.int32, device="cuda")

    def steps() -> list[Tensor]:
        out = []
        for step in logits:
            ops.sample(step, 0.0, 0, 1.0, 0.0, 0, 0, last_tokens=last)
            out.append(ops.embed(ids, weight, last))
        return out

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = steps()
    for _ in range(3):
        for result in results:
            result.fill_(float("nan"))
        graph.replay()
        for step, result in zip(logits, results, strict=True):
            tokens = step.argmax(-1)
            tokens[1], tokens[2] = tokens[2], 7
            assert torch.equal(result, weight[tokens])
