"""Layers that ``quantize_`` cannot stand for are left, and each says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class Inherits(nn.TransformerEncoderLayer):
    """The fast path that reads the weights is in the code of the base class."""


class ReadsFurtherDown(nn.Module):
    """As vision towers, whose type is that of a layer of their first block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"fc": nn.Linear(64, 64)}) for _ in range(2)])
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.blocks[0]["fc"].weight.dtype)
        for block in self.blocks:
            x = block["fc"](x)
        return self.head(x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_weight_that_a_base_class_reads_is_left(dynamic: bool):
    module, x = Inherits(64, 4, 128, batch_first=True).eval(), torch.randn(2, 5, 64)
    with torch.inference_mode():
        expected = module(x)
        done = ridgeline.quantize_(module, "fp8", dynamic=dynamic)
        assert torch.equal(module(x), expected)
    assert dict(done.left)["linear1"] == "its weight is read by the Inherits"


def test_a_weight_that_a_module_further_up_reads_is_left():
    module, x = nn.Sequential(ReadsFurtherDown()).eval(), torch.randn(3, 64)
    done = ridgeline.quantize_(module, "fp8")
    with torch.inference_mode():
        assert module(x).dtype == torch.float32
    assert done.layers == ("0.head",)  # the index is not read: no block is told from another
    assert dict(done.left)["0.blocks.1.fc"] == "its weight is read by the ReadsFurtherDown"


class ReadsInALoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(2)])
        self.inner = nn.Sequential(nn.Linear(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x @ layer.weight.to(x.dtype).T  # codes of fp8 without their scales
        return self.inner(x)


class InheritsTheLoop(ReadsInALoop):
    pass


@pytest.mark.parametrize("kind", [ReadsInALoop, InheritsTheLoop])
def test_weights_that_a_forward_reads_by_another_name_are_left(kind: type[ReadsInALoop]):
    module, x = nn.Sequential(kind()), torch.randn(3, 64)
    with torch.no_grad():
        expected = module(x)
        done = ridgeline.quantize_(module, "fp8")
        assert (module(x) - expected).norm() < 0.1 * expected.norm()
    assert done.layers == ("0.inner.0",)
    assert dict(done.left)["0.layers.1"] == f"its weight may be read by the {kind.__name__}"


class Doubled(Tensor):
    """Means twice what it holds, as quantised and distributed tensors mean something else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        x, weight, *rest = args
        return func(x, 2 * weight.as_subclass(Tensor), *rest)


def test_a_weight_of_a_kind_of_its_own_is_left():
    module, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(3, 64)
    module[0].weight = nn.Parameter(torch.randn(64, 64).as_subclass(Doubled))
    expected = module(x)
    assert dict(ridgeline.quantize_(module, "int8").left) == {"0": "its weight is a Doubled"}
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("fmt", ["int4", "w4a8", "fp8", "int8"])
def test_any_strides_of_a_weight_will_do(fmt: str):
    weight = torch.randn(128, 64).t()
    done = []
    for own in (weight, weight.contiguous()):
        module = nn.Sequential(nn.Linear(128, 64))
        module[0].weight = nn.Parameter(own)
        module[0].bias = nn.Parameter(torch.linspace(-1, 1, 128)[::2])
        assert ridgeline.quantize_(module, fmt).layers == ("0",)
        with torch.inference_mode():
            done.append(module(torch.linspace(-1, 1, 256).view(2, 128)))
    assert torch.equal(*done)


@pytest.mark.parametrize("call", [lambda m: ridgeline.quantize_(m, "fp8"), ridgeline.optimize_])
def test_what_is_no_module_is_named(call: Any):
    with pytest.raises(TypeError, match=r"^mod\w+: expected an nn.Module, got \[\]"):
        call([])


def test_a_format_that_is_no_name_is_refused():
    with pytest.raises(
        ValueError, match=r"^format: expected 'int4', 'w4a8', 'fp8', 'int8', got \['fp8'\]"
    ):
        ridgeline.quantize_(nn.Sequential(), ["fp8"])


# ---- w4a8 ---------------------------------------------------------------------------------------


def test_w4a8_rounds_inputs_where_the_product_is_in_8_bits():
    columns = (256, 64, 192, 96, 30)  # two groups, one of all, groups of 64, of 32, none
    module = nn.ModuleList([nn.Linear(width, 16) for width in columns])
    done = ridgeline.quantize_(module, "w4a8")
    assert [type(layer).__name__ for layer in module] == [
        *("LinearW4A8", "LinearW4A8", "Linear4bit", "Linear4bit", "Linear"),
    ]
    assert dict(done.chosen) == {
        "1": "groups of 64",
        "2": "groups of 64, inputs not rounded",
        "3": "groups of 32, inputs not rounded",
    }
    assert [name for name, _ in done.left] == ["4"] and done.layers == ("0", "1", "2", "3")
    assert "chosen: 3: groups of 32, inputs not rounded\nleft: 4: weight: expected K" in str(done)


@pytest.mark.parametrize("group", [-1, 256])
def test_w4a8_takes_groups_that_128_divides(group: int):
    module = nn.ModuleList([nn.Linear(512, 16), nn.Linear(384, 16)])
    done = ridgeline.quantize_(module, "w4a8", group_size=group)
    assert [layer.group_size for layer in module] == ([512, 384] if group == -1 else [256, 128])
    assert all(isinstance(layer, ridgeline.nn.LinearW4A8) for layer in module)
    assert done.chosen == (() if group == -1 else (("1", "groups of 128"),))


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_w4a8_multiplies_what_int4_does_by_rounded_inputs(
    bias: bool, dtype: torch.dtype, bound: float
):
    linear = nn.Linear(256, 48, bias).to(dtype)
    four, eight = nn.Sequential(linear), nn.Sequential(linear)
    ridgeline.quantize_(four, "int4")
    ridgeline.quantize_(eight, "w4a8")
    x = torch.randn(2, 5, 256).to(dtype)
    codes, scale = ridgeline.ops.quantize_fp8(x)
    with torch.inference_mode():
        expected, y = four((codes.float() * scale).to(dtype)), eight(x)
    assert y.dtype == dtype and y.shape == expected.shape
    assert (y - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize(
    ("format", "options", "error", "message"),
    [
        ("w4a8", {"zero_point": True}, TypeError, "zero_point: not an option of 'w4a8', which has"),
        ("w4a8", {"dynamic": True}, TypeError, "dynamic: not an option of 'w4a8'"),
        ("w4a8", {"threshold": 6.0}, TypeError, "threshold: not an option of 'w4a8'"),
        ("w4a8", {"seen": ridgeline.Observed({}, {})}, ValueError, 'seen: expected with .* "int8"'),
        ("w4a8", {"group_size": 64}, ValueError, "group_size: expected -1 or a multiple of 128"),
        ("w4a8", {"group_size": 0}, ValueError, "group_size: expected -1 or a multiple of 128"),
        ("w4a8", {"group_size": "128"}, TypeError, "group_size: expected an integer, got '128'"),
        ("int4", {"dynamic": True}, TypeError, "dynamic: not an option of 'int4', which has group"),
        ("int8", {"largest": None}, TypeError, "largest: not an option of 'int8', which has seen"),
    ],
)
def test_options_of_another_format_are_refused(
    format: str, options: dict[str, Any], error: type[Exception], message: str
):
    module = nn.Sequential(nn.Linear(128, 16))
    with pytest.raises(error, match=f"^{message}"):
        ridgeline.quantize_(module, format, **options)
    assert type(module[0]) is nn.Linear


def test_stacked_experts_are_left():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts = 3
            self.up = nn.Parameter(torch.zeros(3, 64, 64))
            self.down = nn.Parameter(torch.zeros(3, 64, 32))

    done = ridgeline.quantize_(nn.Sequential(nn.Linear(64, 64), Experts()), "fp8")
    assert done.layers == ("0",)
    assert done.left == (("1", "stacked experts are no linear layers"),)
    assert "left: 1: stacked experts" in str(done)
