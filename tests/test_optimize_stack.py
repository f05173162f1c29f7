"""Quantised products of one input become one that rounds inputs as they did, or are left."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ridgeline
from ridgeline import ops
from ridgeline.nn import Linear4bit, LinearW4A8


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(128, 256), nn.Linear(128, 256)
        self.down_proj, self.act_fn = nn.Linear(256, 128), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.fixture
def mlp() -> Gated:
    torch.manual_seed(0)
    return Gated().eval()


@pytest.mark.parametrize("format", ["int4", "w4a8"])
def test_a_stack_rounds_inputs_as_its_parts_do(mlp: Gated, format: str):
    ridgeline.quantize_(mlp, format)
    x, weight = torch.randn(3, 128), torch.rand(128) + 0.5
    parts = mlp.gate_proj, mlp.up_proj
    if format == "w4a8":
        codes, scale = ops.rmsnorm(x, weight, out_quant="fp8")
        normed = {"x": codes, "x_scale": scale}
    else:
        normed = {"x": ops.rmsnorm(x, weight)}
    with torch.no_grad():
        plain = torch.cat([part(x) for part in parts], -1)
        after_norm = [ops.int4_linear(weight=p.weight, bias=p.bias, **normed) for p in parts]
        tree = nn.ModuleDict({"mlp": mlp})
        assert ("mlp", "mlp (silu_mul)") in ridgeline.optimize_(tree).swapped
        fused = mlp.ridgeline_fused
        torch.testing.assert_close(fused(x), plain)
        torch.testing.assert_close(fused.product(x, norm_weight=weight), torch.cat(after_norm, -1))


def test_products_of_which_one_rounds_inputs_are_left(mlp: Gated):
    mlp.gate_proj = LinearW4A8.from_torch(mlp.gate_proj)
    mlp.up_proj = Linear4bit.from_torch(mlp.up_proj)
    x, tree = torch.randn(3, 128), nn.ModuleDict({"mlp": mlp})
    with torch.no_grad():
        expected = mlp(x)
        done = ridgeline.optimize_(tree)
        torch.testing.assert_close(mlp(x), expected)
    reasons = {name: reason for name, _, reason in done.left}
    assert reasons["mlp"] == "its projections differ in kind, input, dtype or bias"
