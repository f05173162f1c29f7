"""Columns of activations are divided in the norm before them, or left out of int8."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ridgeline

COLUMN = 5  # whose inputs are far larger than the others


class OffsetNorm(nn.Module):
    """As Gemma's: one is added to the weight, so that dividing it divides nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:]) * (1 + self.weight)


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.gate, self.up = norm, nn.Linear(64, 96), nn.Linear(64, 96)
        self.down = nn.Linear(96, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.down(F.silu(self.gate(y)) * self.up(y))


def made(kind: str) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    norm = {"rms": nn.RMSNorm, "layer": nn.LayerNorm, "offset": OffsetNorm}[kind](64)
    block = Block(norm).eval()
    with torch.no_grad():
        norm.weight[COLUMN] = 60.0
    return block, torch.randn(3, 40, 64)


def error(block: nn.Module, x: Tensor, expected: Tensor) -> float:
    with torch.no_grad():
        return float((block(x) - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_smoothing_keeps_the_function_and_helps_int8(kind: str) -> None:
    block, x = made(kind)
    with torch.no_grad():
        expected = block(x)
    seen = ridgeline.observe(block, lambda: block(x))
    assert seen.fed == {"norm": ["gate", "up"]}
    assert seen.largest["gate"].argmax() == COLUMN
    plain = copy.deepcopy(block)
    ridgeline.quantize_(plain, "int8")
    assert ridgeline.smooth_(block, seen) == ("norm",)
    assert error(block, x, expected) < 1e-5
    ridgeline.quantize_(block, "int8")
    assert error(block, x, expected) < 0.5 * error(plain, x, expected)


@pytest.mark.parametrize("alpha", [0, 1])
def test_factors_are_of_the_largest_inputs_and_weights(alpha: int) -> None:
    """Of all runs, and of all layers that read the norm; the weights alone, or the inputs alone."""
    block, x = made("rms")
    before = copy.deepcopy(block)
    seen = ridgeline.observe(block, lambda: (block(x), block(x[:, :1])))
    largest = before.norm(x).detach().abs().flatten(0, 1).amax(0)
    assert torch.equal(seen.largest["gate"], largest)
    with torch.no_grad():
        block.up.weight.mul_(3)
    of_weights = torch.cat((before.gate.weight, 3 * before.up.weight)).detach().abs().amax(0)
    assert ridgeline.smooth_(block, seen, alpha=alpha) == ("norm",)
    factors = largest if alpha else 1 / of_weights
    torch.testing.assert_close(block.norm.weight, before.norm.weight / factors)
    torch.testing.assert_close(block.gate.weight, before.gate.weight * factors)


def test_norms_of_other_dimensions_are_left() -> None:
    """Over a batch, whose statistics a probe would change; over groups of another dimension."""
    torch.manual_seed(0)
    for norm, x in ((nn.BatchNorm1d(8), torch.randn(6, 8)), (nn.GroupNorm(2, 4), None)):
        x = torch.randn(6, 4, 8) if x is None else x
        model = nn.Sequential(norm, nn.Linear(8, 16))
        seen = ridgeline.observe(model, lambda: model(x))  # noqa: B023
        kept = copy.deepcopy(model.state_dict())
        assert seen.fed == {"0": ["1"]} and ridgeline.smooth_(model, seen) == ()
        assert all(torch.equal(kept[key], value) for key, value in model.state_dict().items())


def test_a_norm_that_its_weight_does_not_scale_is_left() -> None:
    block, x = made("offset")
    kept = copy.deepcopy(block.state_dict())
    seen = ridgeline.observe(block, lambda: block(x))
    assert ridgeline.smooth_(block, seen) == ()
    assert all(torch.equal(kept[key], value) for key, value in block.state_dict().items())


def test_columns_of_outliers_stay_in_their_dtype() -> None:
    block, x = made("rms")
    with torch.no_grad():
        expected = block(x)
    seen = ridgeline.observe(block, lambda: block(x))
    plain = copy.deepcopy(block)
    ridgeline.quantize_(plain, "int8", skip=("down",))
    ridgeline.quantize_(block, "int8", skip=("down",), seen=seen, threshold=20.0)
    assert block.gate.outliers.tolist() == [COLUMN] and "1 columns left" in repr(block.gate)
    assert error(block, x, expected) < 0.5 * error(plain, x, expected)


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu", "relu", "silu_mul"])
def test_what_is_fused_follows_both_parts(activation: str | None) -> None:
    torch.manual_seed(1)
    linear, x = nn.Linear(64, 32), torch.randn(5, 64)
    x[:, COLUMN] *= 50
    layer = ridgeline.nn.LinearInt8.from_torch(linear, largest=x.abs().amax(0), threshold=20.0)
    norm = torch.rand(64) + 0.5
    with torch.no_grad():
        residual = torch.randn(5, 16 if activation == "silu_mul" else 32)
        fused = {"activation": activation, "residual": residual, "norm_weight": norm}
        expected = ridgeline.ops.linear(x, linear.weight, linear.bias, **fused)
        actual = layer.product(x, **fused)
    assert (actual - expected).norm() < 0.02 * expected.norm()


def test_alpha_is_checked() -> None:
    block, x = made("rms")
    seen = ridgeline.observe(block, lambda: block(x))
    with pytest.raises(ValueError, match="alpha: expected a number from 0 to 1, got 2"):
        ridgeline.smooth_(block, seen, alpha=2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(ids)))


class Twice(nn.Module):
    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.linear = nn.LayerNorm(16), second, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.first(x)) + self.linear(self.second(x))


@pytest.mark.parametrize("case", ["shared weight", "two norms", "a norm and something else"])
def test_a_weight_that_others_use_is_left(case: str) -> None:
    torch.manual_seed(3)
    module: nn.Module = Tied()
    x = torch.arange(12)
    if case != "shared weight":
        module = Twice(nn.LayerNorm(16) if case == "two norms" else nn.Tanh())
        x = torch.randn(5, 16) * 4
    with torch.no_grad():
        expected = module(x)
    assert ridgeline.smooth_(module, ridgeline.observe(module, lambda: module(x))) == ()
    with torch.no_grad():
        assert torch.equal(module(x), expected)


def test_layers_that_saw_nothing() -> None:
    block, x = made("rms")
    seen = ridgeline.observe(block, lambda: (block.gate(x[:0]), block.gate(x)))
    done = ridgeline.quantize_(block, "int8", seen=seen, threshold=6.0)
    assert done.layers == ("gate",)
    assert {reason for _, reason in done.left} == {"it was not run while its inputs were observed"}


@pytest.mark.parametrize(
    ("format", "options", "message"),
    [
        ("int4", {"seen": ridgeline.Observed({}, {})}, 'seen: expected with format "int8" only'),
        ("int8", {"threshold": 6.0}, "threshold: expected with seen"),
    ],
)
def test_options_that_do_not_go_together(format: str, options: dict, message: str) -> None:
    block, _ = made("rms")
    with pytest.raises(ValueError, match=message):
        ridgeline.quantize_(block, format, **options)


def test_layers_that_are_not_as_they_were_seen_are_refused() -> None:
    block, x = made("rms")
    seen = ridgeline.observe(block, lambda: block(x))
    ridgeline.quantize_(block, "int8")
    with torch.no_grad():
        expected = block(x)
    for other in (block, nn.Sequential(), Twice(nn.Tanh())):
        with pytest.raises(ValueError, match="module: expected 'gate' as it was seen, .* 64 inp"):
            ridgeline.smooth_(other, seen)
    assert error(block, x, expected) == 0  # codes times factors, before this was refused


def test_columns_of_another_module_are_refused() -> None:
    block, x = made("rms")
    seen = ridgeline.observe(block, lambda: block(x))
    done = ridgeline.quantize_(nn.ModuleDict({"gate": nn.Linear(32, 8)}), "int8", seen=seen)
    assert done.left == (("gate", "seen: expected 32 columns, as weight has, got [64]"),)


def test_what_is_no_module_function_or_number_is_named() -> None:
    block, x = made("rms")
    seen = ridgeline.observe(block, lambda: block(x))
    calls: dict[str, Callable[[], object]] = {
        "module": lambda: ridgeline.observe(3, lambda: None),  # type: ignore[arg-type]
        "run": lambda: ridgeline.observe(block, None),  # type: ignore[arg-type]
        "threshold": lambda: ridgeline.quantize_(block, "int8", seen=seen, threshold="6"),
    }
    for argument, call in calls.items():
        with pytest.raises(TypeError, match=f"^{argument}: expected .*, got "):
            call()
