"""Quantised linear layers keep their state, wherever it goes, or say what does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("int4", {"group_size": 32}),
    "int4 of 128": ("int4", {}),
    "int4 with zeros": ("int4", {"zero_point": True}),
    "w4a8": ("w4a8", {}),
    "fp8": ("fp8", {}),
    "fp8 dynamic": ("fp8", {"dynamic": True}),
    "int8": ("int8", {}),
}


def quantised(name: str, device: str = "cpu") -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 32, bias=False))
    format, options = FORMATS[name]
    ridgeline.quantize_(module, format, **options)
    return module.to(device)


def run(module: nn.Module) -> Tensor:
    with torch.inference_mode():
        return module(torch.linspace(-1, 1, 3 * 128).view(3, 128))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_module_without_values_takes_those_of_a_state(name: str, assign: bool):
    module = quantised(name)
    other = quantised(name, "meta")
    if not assign:
        other = other.to_empty(device="cpu")
    other.load_state_dict(module.state_dict(), assign=assign)
    assert torch.equal(run(other), run(module))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name, other", [("fp8", "int8"), ("int8", "fp8"), ("int8", "dense")])
def test_codes_of_another_format_are_refused(name: str, other: str, strict: bool):
    dense = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 32, bias=False))
    state = (dense if other == "dense" else quantised(other)).state_dict()
    module = quantised(name)
    before = run(module)
    with pytest.raises(RuntimeError, match=r"1\.weight: expected torch\.\w+8\w*, got torch\.\w+"):
        module.load_state_dict(state, strict=strict)
    assert torch.equal(run(module), before)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "name, other", [("w4a8", "int4 with zeros"), ("int4 with zeros", "int4 of 128")]
)
def test_codes_without_their_zero_points_are_refused(name: str, other: str, strict: bool):
    module = quantised(name)
    before = run(module)
    with pytest.raises(RuntimeError, match=r"1\.zeros: expected (none|a tensor), got "):
        module.load_state_dict(quantised(other).state_dict(), strict=strict)
    assert torch.equal(run(module), before)


@pytest.mark.parametrize("other", ["int4", "fp8", "int8"])
def test_weights_of_another_format_are_refused(other: str):
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.scales|1\.packed"):
        quantised("w4a8").load_state_dict(quantised(other).state_dict())


def test_int4_and_w4a8_have_one_state():
    four, eight = quantised("int4 of 128"), quantised("w4a8")
    expected, rounded = run(four), run(eight)
    with torch.no_grad():
        for buffer in (*four.buffers(), *eight.buffers()):
            buffer.zero_()
    four.load_state_dict(quantised("w4a8").state_dict())
    eight.load_state_dict(quantised("int4 of 128").state_dict())
    assert torch.equal(run(four), expected) and torch.equal(run(eight), rounded)
    assert not torch.equal(expected, rounded)
