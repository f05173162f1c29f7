"""Sampling beyond the op table: frequencies, the exact set at a cut, ties, NaN, batch invariance,
and the same token on both devices.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from op_table.sampling import adjusted, kept_probabilities
from ridgeline import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def draw(logits: Tensor, *, rows: int = 0, device: str = "cpu", **options: Any) -> Tensor:
    """Tokens of ``rows`` draws from one row of logits, at as many positions, on the CPU."""
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 11}
    if rows:
        given["positions"] = torch.arange(rows, dtype=torch.int32, device=device)
        logits = logits.expand(rows, -1)
    given = {"positions": 0} | given | options
    return ops.sample(logits.to(device), **given).cpu()


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_frequencies_follow_the_distribution(options: dict[str, Any], device: str) -> None:
    draws, vocab = 40000, 24
    logits = normal(1, vocab, seed=3, scale=1.5)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    weights = kept_probabilities(logits[0].double(), **settings)
    expected = weights / weights.sum() * draws
    counts = draw(logits, rows=draws, device=device, **options).bincount(minlength=vocab)
    assert int(counts[expected == 0].sum()) == 0, "a token outside the set was drawn"
    expected, counts = expected[expected > 0], counts[expected > 0]
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    # Wilson and Hilferty's normal approximation; 4.5 deviations come once in 300 000 times.
    spread = 2 / (9 * freedom)
    assert ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 4.5


@pytest.mark.parametrize("device", DEVICES)
def test_seeds_give_other_draws(device: str) -> None:
    logits = torch.zeros(1, 1000)
    first, second = (draw(logits, rows=200, device=device, seeds=s) for s in (1, 2**40 + 1))
    assert (first == second).sum() < 10
    assert len(first.unique()) > 150


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [6, 5000, 40000])
def test_greedy_takes_the_lowest_id_of_equals(vocab: int, device: str) -> None:
    logits = -normal(4, vocab).abs()
    logits[0, [2, 5, vocab - 1]] = 3.0
    logits[1, vocab - 1] = 3.0
    logits[2, 3], logits[2, 4] = -0.0, 0.0  # equal numbers of different bits
    logits[3] = 1.0
    assert draw(logits, device=device, temperature=0.0).tolist() == [2, vocab - 1, 3, 0]
    assert draw(logits, device=device, temperature=1e-6).tolist() == [2, vocab - 1, 3, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_equals_of_the_last_token_kept_are_kept(device: str) -> None:
    logits = torch.tensor([[5.0, 4.0, 4.0, 4.0, 1.0, 0.0]]).log()
    assert set(draw(logits, rows=500, device=device, top_k=2).tolist()) == {0, 1, 2, 3}
    assert set(draw(logits, rows=500, device=device, top_p=0.4).tolist()) == {0, 1, 2, 3}
    assert set(draw(logits, rows=500, device=device, top_k=1).tolist()) == {0}
    assert set(draw(logits, rows=500, device=device, top_p=1e-30).tolist()) == {0}


@pytest.mark.parametrize("device", DEVICES)
def test_top_p_keeps_the_smallest_set_that_holds_it(device: str) -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    for top_p, kept in ((0.35, {1}), (0.45, {1, 3}), (0.65, {1, 3}), (0.75, {1, 2, 3})):
        assert set(draw(logits, rows=500, device=device, top_p=top_p).tolist()) == kept
    # After top_k the rest is normalised: 0.4 of 0.7 holds 0.55 of it.
    assert set(draw(logits, rows=500, device=device, top_k=2, top_p=0.55).tolist()) == {1}
    assert set(draw(logits, rows=500, device=device, min_p=0.6).tolist()) == {1, 3}


LARGE_SETS = [
    ("top_k beyond what thread maxima bound", {"top_k": 900}, 3.0),
    ("more equal logits than are listed", {"top_k": 3}, 0.0),
    ("top_p of a flat distribution", {"top_p": 0.9}, 0.2),
    ("top_p of equal logits", {"top_p": 0.5}, 0.0),
    ("top_p of a steep one", {"top_p": 0.9}, 4.0),
    ("both, large", {"top_k": 5000, "top_p": 0.95}, 1.0),
    ("min_p under both", {"top_k": 2000, "top_p": 0.99, "min_p": 0.05}, 1.0),
    ("a high temperature", {"top_p": 0.9, "temperature": 50.0}, 3.0),
    ("a low temperature", {"top_p": 0.9, "temperature": 0.01}, 3.0),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options, scale", [s[1:] for s in LARGE_SETS], ids=[s[0] for s in LARGE_SETS]
)
def test_large_vocabularies(options: dict[str, Any], scale: float, device: str) -> None:
    logits = normal(1, 30011, seed=5, scale=scale)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    weights = kept_probabilities(logits[0].double(), **settings)
    tokens = draw(logits, rows=100, device=device, **options)
    assert bool((weights[tokens.long()] > 0).all())
    everything = draw(logits.flip(1), rows=100, device=device, **options)
    assert bool((weights.flip(0)[everything.long()] > 0).all())


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_depends_on_nothing_beside_it(device: str) -> None:
    logits = normal(9, 12345, scale=2.0).to(device)
    options = {
        "temperature": torch.linspace(0, 1.6, 9, device=device),
        "top_k": torch.tensor([0, 40, 700] * 3, dtype=torch.int32, device=device),
        "top_p": torch.tensor([1.0, 0.9, 0.5] * 3, device=device),
        "min_p": torch.tensor([0.0, 0.0, 0.01] * 3, device=device),
        "seeds": torch.arange(9, device=device) * 12345,
        "positions": torch.arange(9, dtype=torch.int32, device=device),
    }
    together = ops.sample(logits, **options)
    for row in range(9):
        alone = {name: value[row : row + 1] for name, value in options.items()}
        assert ops.sample(logits[row : row + 1], **alone).item() == together[row].item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str
)
@pytest.mark.parametrize("vocab", [5, 9000])
@pytest.mark.sanitize
def test_nan_and_infinity_never_give_an_id_out_of_range(
    vocab: int, options: dict[str, Any], device: str
) -> None:
    logits = normal(6, vocab)
    logits[0] = math.nan
    logits[1] = -math.inf
    logits[2] = math.inf
    logits[3, ::2] = math.nan
    logits[4, 1] = math.inf
    logits[5] = -math.inf
    logits[5, 3] = -1000.0
    tokens = draw(logits, device=device, **options).tolist()
    assert tokens[:2] == [-1, -1], "nothing to choose from gives no token"
    assert 0 <= tokens[2] < vocab
    assert tokens[3] % 2 == 1, "NaN counts as -inf"
    assert tokens[4:] == [1, 3]


@pytest.mark.gpu
def test_cuda_is_greedy_where_the_temperature_makes_no_sense() -> None:
    logits = normal(2, 100).cuda()
    temperature = torch.tensor([math.nan, -1.0], device="cuda")
    assert ops.sample(logits, temperature, 0, 1.0, 0.0, 0, 0).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("positions", -1),
    ],
)
def test_refuses_parameters_out_of_range(name: str, value: float) -> None:
    dtype = torch.int32 if name in ("top_k", "positions") else torch.float32
    with pytest.raises(ValueError, match=f"{name}: expected .*at 1"):
        draw(normal(2, 8), **{name: torch.tensor([1, value], dtype=dtype)})
    with pytest.raises(ValueError, match=f"{name}: expected"):
        draw(normal(2, 8), **{name: value})


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_bias_and_mask(device: str) -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.1]]).expand(6, -1).contiguous()
    penalties = torch.tensor([[1.0, 0, 0]] * 6)
    penalties[0, 0] = 1.5  # 2 / 1.5 is below 1.9
    penalties[1, 0] = 1.5  # token 1 is seen as well: 1.9 / 1.5
    penalties[2, 1] = 0.2  # presence: in the output
    penalties[3, 1] = 0.2  # in the prompt alone: none
    penalties[4, 2] = 0.06  # frequency, twice
    penalties[5, 2] = 0.04
    counts = torch.zeros(6, 4, dtype=torch.int32)
    counts[0, 0], counts[1, :2], counts[2, 0], counts[3, 0], counts[4:, 0] = 1, 1, 2, 1, 4
    given = {"penalties": penalties.to(device), "token_counts": counts.to(device)}
    greedy = {"temperature": 0.0, "device": device}
    assert draw(logits, **greedy, **given).tolist() == [1, 0, 1, 0, 1, 0]
    bias = torch.zeros(6, 4, device=device)
    bias[:, 2] = 10.0
    assert draw(logits, **greedy, **given, bias=bias).tolist() == [2] * 6
    mask = torch.tensor([[False, False, False, True]]).expand(6, -1).contiguous().to(device)
    assert draw(logits, **greedy, **given, bias=bias, mask=mask).tolist() == [3] * 6
    assert draw(logits, device=device, bias=bias, mask=mask).tolist() == [3] * 6


def test_logprobs_are_those_of_the_model() -> None:
    logits = normal(3, 50)
    mask = torch.zeros(3, 50, dtype=torch.bool)
    mask[:, 7] = True
    tokens, logprobs, ids = ops.sample(logits, 0.5, 0, 1.0, 0.0, 0, 0, mask=mask, logprobs=2)
    reference = logits.log_softmax(-1)
    assert tokens.tolist() == [7, 7, 7] and ids[:, 0].tolist() == [7, 7, 7]
    assert torch.allclose(logprobs[:, 0], reference[:, 7])
    assert torch.equal(ids[:, 1:].long(), reference.topk(2).indices)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [8193, 128256, 260003])  # a split in two, aligned rows, odd ones
@pytest.mark.parametrize("rows", [1, 12, 40, 100, 300])  # from 16 blocks a row to one
def test_cuda_gives_the_same_token_however_a_row_is_split(rows: int, vocab: int) -> None:
    kinds = {
        "temperature": torch.tensor([0.8, 0.0, 0.8, 0.8, 0.8, 1.3, 0.8]),
        "top_k": torch.tensor([50, 0, 0, 0, 50, 3000, 0], dtype=torch.int32),
        "top_p": torch.tensor([0.9, 1.0, 1.0, 0.9, 1.0, 0.95, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.001, 0.05]),
        "seeds": torch.arange(7) + 5,
        "positions": torch.arange(7, dtype=torch.int32),
    }
    logits = normal(1, vocab, seed=vocab)
    expected = ops.sample(logits.expand(7, -1), **kinds)
    kind = torch.arange(rows) % 7
    batch = {name: values[kind].cuda() for name, values in kinds.items()}
    tokens = ops.sample(logits.cuda().expand(rows, -1), **batch)
    assert torch.equal(tokens.cpu(), expected[kind])


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [100, 4096, 32000, 128256, 262208])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_cuda_equals_cpu(scale: float, dtype: torch.dtype, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows = 24
    options = {
        "temperature": torch.rand(rows, generator=generator) * 2,
        "top_k": torch.randint(-1, 2000, (rows,), generator=generator, dtype=torch.int32),
        "top_p": torch.rand(rows, generator=generator).clamp(min=0.01),
        "min_p": torch.rand(rows, generator=generator) * 0.1,
        "seeds": torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        "positions": torch.randint(0, 2**31 - 1, (rows,), generator=generator, dtype=torch.int32),
    }
    options["top_k"][::3] = 0
    options["top_p"][1::4] = 1.0
    options["min_p"][::2] = 0.0
    logits = normal(rows, vocab, seed=1, scale=scale).to(dtype)
    on_gpu = {name: value.cuda() for name, value in options.items()}
    assert torch.equal(ops.sample(logits.cuda(), **on_gpu).cpu(), ops.sample(logits, **options))
    extras = {
        "penalties": torch.rand(rows, 3, generator=generator) + 0.5,
        "token_counts": torch.randint(0, 5, (rows, vocab), generator=generator, dtype=torch.int32),
        "bias": normal(rows, vocab, seed=2),
        "mask": torch.rand(rows, vocab, generator=generator) < 0.7,
    }
    gpu_extras = {name: value.cuda() for name, value in extras.items()}
    tokens = ops.sample(logits.cuda(), **on_gpu, **gpu_extras)
    assert torch.equal(tokens.cpu(), ops.sample(logits, **options, **extras))
    assert bool(adjusted(logits, **extras).gather(1, tokens.cpu().long()[:, None]).isfinite().all())


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "seeds", "positions"])
@pytest.mark.parametrize("value", [0.5, True, None, "1", [1, 1]], ids=repr)
def test_a_number_of_another_kind_is_refused(name: str, value: Any) -> None:
    """A fraction would be cut off in silence; others failed without the argument's name."""
    given: dict[str, Any] = dict(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=1, positions=1
    )
    if value == 0.5 and name in ("temperature", "top_p", "min_p"):
        return
    with pytest.raises(ValueError, match=f"^{name}: expected a tensor or one "):
        ops.sample(torch.randn(2, 8), **given | {name: value})


def test_more_logprobs_than_the_vocabulary_has_are_refused_ahead_of_the_draw() -> None:
    last = torch.full((2,), -7, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^logprobs: expected 0 to the vocabulary's 8, got 9"):
        ops.sample(torch.randn(2, 8), 1.0, 0, 1.0, 0.0, 1, 1, logprobs=9, last_tokens=last)
    assert last.tolist() == [-7, -7]


@pytest.mark.parametrize("logits", [None, torch.tensor(1.0), torch.ones(8)], ids=repr)
def test_logits_of_another_rank_are_refused_by_name(logits: Any) -> None:
    with pytest.raises(ValueError, match="^logits: expected 2 dimensions, got "):
        ops.sample(logits, 1.0, 0, 1.0, 0.0, 1, 1)


@pytest.mark.parametrize("number", [np.int64(3), np.int32(3), 3])
def test_a_number_of_numpy_is_one(number: Any) -> None:
    logits = torch.randn(2, 8)
    given = ops.sample(logits, np.float32(0.5), number, 0.9, 0.0, number, number)
    assert torch.equal(given, ops.sample(logits, 0.5, 3, 0.9, 0.0, 3, 3))


def test_compiled_numbers_may_change() -> None:
    logits = torch.randn(2, 64)
    compiled = torch.compile(ops.sample, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed in range(3):
        given = (logits, 1.0 + seed / 4, 5 + seed, 0.9, 0.1, seed, seed)
        assert torch.equal(compiled(*given), ops.sample(*given))
