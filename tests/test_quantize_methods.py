"""GPTQ, AWQ and clipping lose less of a product than rounding to nearest, where they can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ridgeline import ops
from ridgeline._quantize.gptq import Factor, gptq
from ridgeline._quantize.moments import Moments
from ridgeline._quantize.scaling import awq_factors
from ridgeline._quantize.schemes import Scheme
from ridgeline.quant.stored import GroupedCodes
from tiny_model import one_thread  # noqa: F401

N, K = 48, 256
SCHEMES = [
    Scheme("int4", 32), Scheme("int4", 128, zero_point=True), Scheme("int4", -1),
    Scheme("int4", 64, dtype=torch.bfloat16), Scheme("fp8", granularity="tensor"),
    Scheme("fp8"), Scheme("fp8", granularity="block"), Scheme("int8"),
]  # fmt: skip


def inputs(kind: str) -> Tensor:
    """Neighbouring columns go together; or a few are fifty times as large."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(600, K, generator=draw)
    if kind == "correlated":
        return x @ torch.randn(K, 24, generator=draw) @ torch.randn(24, K, generator=draw) + x
    x[:, ::64] *= 50
    return x


def seen(x: Tensor) -> Moments:
    moments = Moments.empty(x.shape[1], x.device, product=True)
    for some in x.split(100):
        moments.add(some)
    return moments


def weight_of(draw: int = 1) -> Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(draw))


def lost(x: Tensor, actual: Tensor, expected: Tensor) -> float:
    return float((x @ (actual - expected).t()).norm() / (x @ expected.t()).norm())


def name(scheme: Scheme) -> str:
    return f"{scheme.format} {scheme.group_size} {scheme.zero_point} {scheme.granularity}"


@pytest.mark.parametrize(
    ("scheme", "most"), [(Scheme("int8"), 127), (Scheme("fp8"), 448)], ids=["int8", "fp8"]
)
def test_what_others_lost_stays_within_the_codes(scheme: Scheme, most: int):
    """Columns that make up for others may leave the range that their scale was chosen for."""
    codes = scheme.codes(torch.tensor([-600.0, 600.0]), torch.ones(1), torch.zeros(1))
    assert codes.tolist() == [-most, most]


@pytest.mark.parametrize(("N", "last", "fits"), [(96, False, False), (96, True, True),
                                                 (128, False, True)])  # fmt: skip
def test_blocks_of_one_part_do_not_reach_into_the_next(N: int, last: bool, fits: bool):
    scheme = Scheme("fp8", granularity="block")
    if fits:
        scheme.check("q_proj", N, 96, last=last)
        return
    with pytest.raises(ValueError, match="q_proj has 96 rows, and others follow"):
        scheme.check("q_proj", N, 96, last=last)


def test_moments_are_sums_over_all_tokens():
    x = inputs("correlated")
    moments = seen(x)
    torch.testing.assert_close(moments.product, x.t() @ x, rtol=1e-4, atol=0.5)
    torch.testing.assert_close(moments.total, x.abs().sum(0))
    assert moments.count == 600 and torch.equal(moments.largest, x.abs().amax(0))
    factors = torch.rand(K) + 0.5
    moments.divide(factors)
    again = x / factors
    torch.testing.assert_close(moments.product, again.t() @ again, rtol=1e-4, atol=0.5)
    torch.testing.assert_close(moments.largest, again.abs().amax(0))


@pytest.mark.parametrize("act_order", ["none", "static", "group"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_gptq_loses_less_than_rounding_to_nearest(scheme: Scheme, act_order: str):
    x, weight = inputs("correlated"), weight_of()
    factor = Factor.of(seen(x), damping=0.01, act_order=act_order)
    made = gptq(weight, factor, scheme)
    nearest = scheme.nearest(weight).dequantize(torch.float32)
    assert lost(x, made.dequantize(torch.float32), weight) < 0.6 * lost(x, nearest, weight)
    if isinstance(made, GroupedCodes):
        assert (made.group_index is not None) == (act_order == "group")
        # Every order that is written is one that the ops take.
        packed = ops.Int4Weight.from_quantized(made.q, made.scales, made.zeros, made.group_index)
        assert torch.equal(packed.dequantize(), made.dequantize(scheme.dtype))


@pytest.mark.parametrize("scheme", SCHEMES, ids=name)
def test_gptq_of_inputs_that_say_nothing_is_rounding_to_nearest(scheme: Scheme):
    """Columns that are never large together make up for nothing; unseen ones are kept too."""
    weight, moments = weight_of(), Moments.empty(K, torch.device("cpu"), product=True)
    moments.product = torch.diag(torch.arange(K).float())  # the first column was not seen
    made = gptq(weight, Factor.of(moments, damping=0.01, act_order="static"), scheme)
    nearest = scheme.nearest(weight)
    torch.testing.assert_close(
        made.dequantize(torch.float32), nearest.dequantize(torch.float32), rtol=0.13, atol=1e-3
    )


def test_moments_of_few_tokens_are_damped_until_they_can_be_factored():
    x, scheme = inputs("correlated")[:3], Scheme("int4", 32)
    made = gptq(weight_of(), Factor.of(seen(x), damping=1e-6, act_order="none"), scheme)
    assert torch.isfinite(made.dequantize(torch.float32)).all()
    with pytest.raises(ValueError, match="inputs of a product are not finite"):
        Factor.of(seen(x * float("nan")), damping=0.01, act_order="none")


def test_awq_loses_less_than_rounding_to_nearest():
    x, weight, scheme = inputs("outliers"), weight_of(), Scheme("int4", 32)
    factors = awq_factors([(weight, seen(x))], scheme, repeats=(1, 1, K))
    scaled = scheme.nearest(weight * factors).dequantize(torch.float32) / factors
    nearest = scheme.nearest(weight).dequantize(torch.float32)
    assert lost(x, scaled, weight) < 0.7 * lost(x, nearest, weight)
    assert factors[::64].min() > 2 * factors[1]


def test_awq_leaves_what_it_cannot_help():
    x, scheme = torch.eye(K), Scheme("int4", 32)
    weight = torch.ones(N, K)  # on the grid already
    factors = awq_factors([(weight, seen(x))], scheme, repeats=(1, 1, K))
    assert torch.equal(factors, torch.ones(K))


def test_factors_lose_least_over_all_readers_and_columns_without_inputs():
    """The power is that of the first reader, whose weight is larger; a column is never seen."""
    x = inputs("outliers")
    x[:, 3] = 0
    moments, scheme = seen(x), Scheme("int4", 32)
    large, small = (100 * weight_of(), moments), (torch.ones(N, K), moments)
    alone = awq_factors([large], scheme, repeats=(1, 1, K))
    assert bool(torch.isfinite(alone).all()) and alone.unique().numel() > 2
    assert torch.equal(awq_factors([large, small], scheme, repeats=(1, 1, K)), alone)


@pytest.mark.parametrize("act_order", ["static", "group"])
def test_columns_of_large_inputs_are_rounded_first(act_order: str):
    factor = Factor.of(seen(inputs("outliers")), damping=0.01, act_order=act_order)
    assert sorted(factor.order[:4].tolist()) == [0, 64, 128, 192]


def test_heads_that_share_values_share_factors():
    x = inputs("outliers")
    factors = awq_factors([(weight_of(), seen(x))], Scheme("int4", 32), repeats=(2, 4, 32))
    by_head = factors.view(2, 4, 32)
    assert torch.equal(by_head, by_head[:, :1].expand(2, 4, 32))


@pytest.mark.parametrize("zero_point", [False, True])
def test_clipping_loses_less_than_the_whole_range(zero_point: bool):
    x, weight = inputs("correlated"), weight_of()
    weight[:, 40] = 8.0  # one value takes half of its group's codes
    x[:, 40] *= 0.01
    scheme = Scheme("int4", 64, zero_point)
    clipped = scheme.nearest(weight, seen(x).product).dequantize(torch.float32)
    whole = scheme.nearest(weight).dequantize(torch.float32)
    assert lost(x, clipped, weight) < 0.8 * lost(x, whole, weight)


class Storages(TorchDispatchMode):
    """How many storages of some bytes are there at once, those that ops are given among them."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._nbytes, self._tensors, self.most = nbytes, [], 0

    def __torch_dispatch__(self, op: Callable, types: Any, args: Any = (), kwargs: Any = None):
        out = op(*args, **(kwargs or {}))
        tensors = [tensor for known in self._tensors if (tensor := known()) is not None]
        tensors += [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, Tensor)]
        large = [t for t in tensors if t.untyped_storage().nbytes() >= self._nbytes]
        self.most = max(self.most, len({t.untyped_storage().data_ptr() for t in large}))
        self._tensors = [ref(t) for t in {id(t): t for t in large}.values()]
        return out


@pytest.mark.parametrize(("act_order", "most"), [("none", 3), ("static", 4), ("group", 4)])
def test_few_matrices_are_there_while_moments_are_factored(act_order: str, most: int):
    """The moments, in order too if there is one, and two of the steps to the factor."""
    moments = seen(inputs("correlated"))
    with Storages(4 * K * K) as storages:
        Factor.of(moments, damping=0.01, act_order=act_order)
    assert 2 < storages.most <= most


@pytest.mark.parametrize("zero_point", [False, True])
def test_few_copies_of_a_weight_are_there_while_factors_are_sought(zero_point: bool):
    rows, scheme = 8 * K, Scheme("int4", 32, zero_point)
    weight, moments = weight_of().repeat(rows // N + 1, 1)[:rows].clone(), seen(inputs("outliers"))
    with Storages(4 * rows * K) as storages:
        awq_factors([(weight, moments)], scheme, repeats=(1, 1, K))
    assert 2 < storages.most <= 3


@pytest.mark.parametrize("clip", [False, True])
def test_few_copies_of_a_weight_are_there_while_it_is_rounded(clip: bool):
    """The weight, its columns by order, their codes; those of a block are smaller."""
    rows, scheme = 8 * K, Scheme("int4", 32)
    weight = weight_of().repeat(rows // N + 1, 1)[:rows].clone()
    factor = Factor.of(seen(inputs("correlated")), damping=0.01, act_order="static")
    with Storages(4 * rows * K) as storages:
        gptq(weight, factor, scheme, clip=clip)
    assert 2 < storages.most <= 3 + clip
