"""The choice of experts, to the bit, and the way of rows to their experts and back."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import ridgeline
from op_table.routing import _order, _route
from ridgeline import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ALL = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.sanitize])]


def logits_of(tokens: int, experts: int, device: str, dtype: torch.dtype) -> Tensor:
    """Few different values, so that most tokens have equal ones."""
    generator = torch.Generator().manual_seed(tokens + experts)
    return (torch.randn(tokens, experts, generator=generator) * 4).round().to(device, dtype)


# Tokens: a block's alone and the edges of its batch of 64, the least chunks, larger ones, and
# chunks of more than a batch. Experts: the edges of what a lane has.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("experts, per_token", [(1, 1), (8, 2), (33, 32), (128, 8), (1023, 3)])
@pytest.mark.parametrize("tokens", [0, 1, 31, 33, 64, 65, 81, 1000, 2049, 9000])
def test_equal_logits_go_to_the_lowest_expert(
    tokens: int, experts: int, per_token: int, device: str
):
    logits = logits_of(tokens, experts, device, torch.bfloat16)
    routing = ops.route_experts(logits, per_token)
    expected = _route(logits.cpu(), per_token)
    assert all(torch.equal(ours.cpu(), other) for ours, other in zip(routing[1:], expected[1:]))
    for again in (logits, logits.float()):
        assert all(map(torch.equal, routing, ops.route_experts(again, per_token)))


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize("tokens, experts, per_token", [(5, 40, 3), (70, 8, 2)])
def test_each_choice_has_a_row(tokens: int, experts: int, per_token: int, device: str):
    """Small, and no reference: what compute-sanitizer watches."""
    logits = logits_of(tokens, experts, device, torch.float16)
    _, offsets, rows, places = ops.route_experts(logits, per_token, normalized=False)
    assert rows.cpu()[places.cpu().long()].T.tolist() == [list(range(tokens))] * per_token
    assert sorted(places.flatten().tolist()) == list(range(tokens * per_token))
    ends = offsets.tolist()
    assert ends[0] == 0 and ends[-1] == tokens * per_token and ends == sorted(ends)
    for low, high in zip(ends, ends[1:]):
        assert rows[low:high].tolist() == sorted(set(rows[low:high].tolist()))


# Tokens: none, one, one more than 64, chunks of more than the least. Choices: a warp's lanes, one
# more, and none of a token's own; 65 tokens of 32 are more than a block takes. Values: the second
# of two dtypes, each expert more than once a token, nobody's at both ends.
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("experts", [1, 8, 1023])
@pytest.mark.parametrize("per_token", [1, 3, 32])
@pytest.mark.parametrize("tokens", [0, 1, 65, 5000])
def test_given_choices_are_put_in_order(tokens: int, per_token: int, experts: int, device: str):
    generator = torch.Generator().manual_seed(tokens + experts)
    chosen = torch.randint(-1, experts + 1, (per_token, tokens), generator=generator).t()
    expected = _order(chosen, experts)
    for dtype in (torch.int64, torch.int32):
        for given in (chosen, chosen.contiguous()):
            order = ops.order_experts(given.to(device, dtype), experts)
            assert all(torch.equal(ours.cpu(), other) for ours, other in zip(order, expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [33, 700])
def test_an_order_is_that_of_the_choice(tokens: int, device: str):
    logits = logits_of(tokens, 40, device, torch.float16)
    _, *expected = ops.route_experts(logits, 6)
    chosen = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :6]
    assert all(map(torch.equal, ops.order_experts(chosen, 40), expected))


@pytest.mark.parametrize("device", ALL)
@pytest.mark.parametrize("tokens", [4, 700])
def test_choices_of_one_token_stay_in_their_order(tokens: int, device: str):
    """Small, and no reference: what compute-sanitizer watches."""
    chosen = torch.tensor([[1, 0, 1, 7, 1, -2]] * tokens, device=device)
    offsets, rows, places = ops.order_experts(chosen, 2)
    assert offsets.tolist() == [0, tokens, 4 * tokens]
    assert rows.tolist() == [t for n in (1, 3, 2) for t in range(tokens) for _ in range(n)]
    first = torch.arange(tokens)[:, None]
    within = torch.tensor([[0, 0, 1, 0, 2, 1]])
    starts = torch.tensor([[1, 0, 1, 4, 1, 4]]) * tokens + first * torch.tensor([3, 1, 3, 2, 3, 2])
    assert torch.equal(places.cpu().long(), starts + within)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_nobody_add_nothing(device: str):
    """Not even where their token has infinities."""
    x = torch.tensor([[1.0] * 16, [float("inf")] * 16], device=device).bfloat16()
    weight = torch.ones(2, 8, 16, device=device, dtype=torch.bfloat16)
    offsets, rows, places = ops.order_experts(torch.tensor([[1, 2], [2, 5]], device=device), 2)
    out = ops.grouped_linear(x, weight, offsets, rows=rows)
    weights = torch.tensor([[0.5, 0.0], [0.0, 0.0]], device=device)
    assert ops.combine_experts(out, places, weights).tolist() == [[8.0] * 8, [0.0] * 8]


@pytest.mark.parametrize("device", DEVICES)
def test_the_order_of_what_is_no_number(device: str):
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[-inf, 1.0, nan, inf, nan], [-0.0, -1.0, 0.0, -inf, -0.0], [-inf] * 5], device=device
    )
    logits = torch.cat([logits, -logits[1:2]])
    weights, offsets, _, places = ops.route_experts(logits, 4)
    chosen = torch.searchsorted(offsets, places.flatten(), right=True, out_int32=True) - 1
    assert chosen.view(4, 4).tolist() == [[2, 4, 3, 1], [0, 2, 4, 1], [0, 1, 2, 3], [3, 1, 0, 2]]
    assert weights.isnan().all(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("tokens", [40, 700])
def test_weights_sum_to_their_share(tokens: int, normalized: bool, device: str):
    logits = torch.randn(tokens, 60, device=device) * 3
    weights = ops.route_experts(logits, 5, normalized=normalized).weights
    shares = logits.softmax(-1).sort(-1, descending=True).values[:, :5]
    if normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, shares, rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_rows_go_to_their_experts_and_back(tokens: int, device: str):
    experts, per_token, N, K = 6, 3, 48, 64
    generator = torch.Generator().manual_seed(tokens)
    x, weight, logits = (
        torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        for shape in ((tokens, K), (experts, N, K), (tokens, experts))
    )
    weights, offsets, rows, places = ops.route_experts(logits, per_token)
    out = ops.grouped_linear(x, weight, offsets, rows=rows)
    out = ops.combine_experts(out, places, weights)
    expected = torch.zeros(tokens, N, device=device)
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    for token, chosen in enumerate(order[:, :per_token].tolist()):
        shares = logits[token, chosen].float().softmax(0)
        for share, expert in zip(shares, chosen):
            expected[token] += share * (weight[expert].float() @ x[token].float())
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=6e-2)


def combine_inputs(device: str, places: list[list[int]]) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.arange(1, 6, dtype=torch.float32)[:, None].repeat(1, 8)
    return (
        x.to(device, torch.float16),
        torch.tensor(places, dtype=torch.int32, device=device),
        torch.tensor([[1.0, 0.5], [0.25, 2.0]], device=device),
    )


OUTSIDE = [
    ([[0, 5], [1, 2]], r"places: expected values in \[0, 5\), got 5 at 1"),
    ([[0, 1], [-1, 2]], r"places: expected values in \[0, 5\), got -1 at 2"),
]


@pytest.mark.parametrize("places, message", OUTSIDE)
def test_places_are_checked_on_the_cpu(places: list[list[int]], message: str):
    with pytest.raises(ValueError, match=message):
        ops.combine_experts(*combine_inputs("cpu", places))


@pytest.mark.gpu
@pytest.mark.parametrize("places, message", OUTSIDE)
def test_cuda_checks_places_on_request_and_reads_row_0_otherwise(
    places: list[list[int]], message: str
):
    given = combine_inputs("cuda", places)
    with ridgeline.debug_checks(), pytest.raises(ValueError, match=message):
        ops.combine_experts(*given)
    mended = [[place if 0 <= place < 5 else 0 for place in row] for row in places]
    expected = ops.combine_experts(*combine_inputs("cuda", mended))
    assert torch.equal(ops.combine_experts(*given), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_the_sum_is_rounded_once_and_in_order(device: str):
    """1 + 2^-11 rounds to 1 in half precision and -1 takes all but the small one away."""
    small = 2.0**-11
    x = torch.tensor([[1.0], [small], [-1.0]], dtype=torch.float16, device=device)
    places = torch.tensor([[0, 1, 2]], dtype=torch.int32, device=device)
    weights = torch.ones(1, 3, device=device)
    assert ops.combine_experts(x, places, weights).item() == small
    large = torch.tensor([[2.0**24], [1.0]], device=device)
    for order, total in (([0, 1, 1], 2.0**24), ([1, 1, 0], 2.0**24 + 2)):
        places = torch.tensor([order], dtype=torch.int32, device=device)
        assert ops.combine_experts(large, places, weights).item() == total


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2048, 131])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_have_the_same_bits_on_both_devices(dtype: torch.dtype, width: int):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(80, width, generator=generator).to(dtype)
    places = torch.randint(0, 80, (20, 6), generator=generator, dtype=torch.int32)
    weights = torch.randn(20, 6, generator=generator)
    on_cuda = ops.combine_experts(x.cuda(), places.cuda(), weights.cuda())
    assert torch.equal(on_cuda.cpu(), ops.combine_experts(x, places, weights))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 640])
def test_waits_for_what_the_kernel_ahead_writes(tokens: int):
    """A graph of layers that each overwrite what the one before has read."""
    experts, width = 32, 1024
    router = torch.randn(experts, width, device="cuda", dtype=torch.bfloat16) / 32
    xs = torch.randn(6, tokens, width, device="cuda", dtype=torch.bfloat16)
    hidden = torch.empty_like(xs[0])

    def layers() -> list[Tensor]:
        out = []
        for x in xs:
            hidden.copy_(x)
            weights, _, rows, places = ops.route_experts(ops.linear(hidden, router), 4)
            sums = ops.combine_experts(hidden[rows.long()], places, weights)
            out += [ops.linear(sums, router), *ops.order_experts(places, 1000)]
        return out

    expected = layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = layers()
    for _ in range(3):
        for result in results:
            result.fill_(math.nan if result.is_floating_point() else -1)
        graph.replay()
        assert all(map(torch.equal, results, expected))
