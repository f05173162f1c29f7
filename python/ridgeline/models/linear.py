"""Weights of a matrix product behind one interface: call it with ``x [tokens, in]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ridgeline import ops

QUANTIZATIONS = ("int4", "fp8")


class Linear(Protocol):
    """``act(x @ weight.T + bias)`` for ``x [tokens, in]``, in the dtype of ``x``.

    ``activation``: that of ``ops.linear``.
    """

    def __call__(self, x: Tensor, activation: str | None = None) -> Tensor: ...


@dataclass(frozen=True)
class DenseLinear:
    """The weight as it is: ``[out, in]``."""

    weight: Tensor
    bias: Tensor | None
    batch_invariant: bool = False

    def __call__(self, x: Tensor, activation: str | None = None) -> Tensor:
        return ops.linear(
            x,
            self.weight,
            self.bias,
            activation=activation,
            batch_invariant=self.batch_invariant,
            weights_ready=True,
        )


@dataclass(frozen=True)
class Int4Linear:
    """Four-bit weights with a scale for each group of inputs."""

    weight: ops.Int4Weight
    bias: Tensor | None
    batch_invariant: bool = False

    def __call__(self, x: Tensor, activation: str | None = None) -> Tensor:
        return ops.int4_linear(
            x,
            self.weight,
            self.bias,
            activation=activation,
            batch_invariant=self.batch_invariant,
            weights_ready=True,
        )


@dataclass(frozen=True)
class Fp8Linear:
    """fp8 weights with a scale for each output."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    batch_invariant: bool = False

    def __call__(self, x: Tensor, activation: str | None = None) -> Tensor:
        return ops.fp8_linear(
            x,
            self.weight,
            self.scale,
            self.bias,
            activation=activation,
            batch_invariant=self.batch_invariant,
            weights_ready=True,
        )


def make_linear(
    weight: Tensor, bias: Tensor | None, *, quantization: str | None, batch_invariant: bool
) -> Linear:
    """A ``Linear`` of ``weight [out, in]``, quantised here unless ``quantization`` is None."""
    if quantization is None:
        return DenseLinear(weight, bias, batch_invariant)
    if quantization == "int4":
        return Int4Linear(ops.pack_int4(weight), bias, batch_invariant)
    assert quantization == "fp8", quantization
    return Fp8Linear(*ops.quantize_fp8(weight, "row"), bias, batch_invariant)
