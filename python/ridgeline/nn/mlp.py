"""The gated MLP of most decoders."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ridgeline import ops
from ridgeline.nn.kinds import expect_kind
from ridgeline.nn.linear import Linear, Product

Gate = Literal["silu_mul", "gelu_mul", "gelu_tanh_mul"]


def gated_product(up: Product, x: Tensor, gate: Gate, **fused: object) -> Tensor:
    """``act(gate rows) * factor rows`` of a stacked product."""
    if gate == "gelu_tanh_mul":  # the one that products do not have as an epilogue
        return ops.gelu_mul(up.product(x, **fused), "tanh")
    return up.product(x, activation=gate, **fused)


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``, gate and factor in one product with the gate fused.

    Args:
        up: the stacked product, ``[2 * inner, dim]``, gate rows first. down: ``[dim, inner]``.
        activation: "silu_mul", "gelu_mul" or "gelu_tanh_mul".
    """

    def __init__(self, up: Product, down: Product, activation: Gate = "silu_mul") -> None:
        super().__init__()
        self.up, self.down, self.activation = up, down, activation

    @classmethod
    def from_torch(
        cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear, activation: Gate = "silu_mul"
    ) -> GatedMLP:
        """Copies gate and up into one weight; shares the weight of down.

        Raises:
            ValueError: gate and up differ in shape, dtype or in having a bias.
        """
        for name, part in (("gate", gate), ("up", up), ("down", down)):
            expect_kind(name, part, nn.Linear, Linear)
        if gate.weight.shape != up.weight.shape or gate.weight.dtype != up.weight.dtype:
            raise ValueError(
                f"up: expected the weight of gate, {gate.weight.dtype} {list(gate.weight.shape)}, "
                f"got {up.weight.dtype} {list(up.weight.shape)}"
            )
        if (gate.bias is None) != (up.bias is None):
            raise ValueError("up: expected a bias exactly where gate has one")
        stacked = nn.Linear(gate.in_features, 2 * gate.out_features, False, device="meta")
        stacked.weight = nn.Parameter(torch.cat((gate.weight, up.weight)).detach())
        if gate.bias is not None:
            stacked.bias = nn.Parameter(torch.cat((gate.bias, up.bias)).detach())
        return cls(Linear.from_torch(stacked), Linear.from_torch(down), activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down.product(gated_product(self.up, x, self.activation))
