"""Norms behind one interface, alone and with the residual before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.ops._out_quant import OutQuant


class Codes(NamedTuple):
    """``values * scale`` in place of a tensor of ``dtype``.

    Attributes:
        values: float8_e4m3fn or int8 ``[tokens, cols]``. scale: float32 ``[tokens, 1]``, or of
            what is not a norm's ``[tokens, cols / 256]``.
    """

    values: Tensor
    scale: Tensor
    dtype: torch.dtype


class Norm(Protocol):
    """A norm over the last dimension."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual += x`` in place; the norm of the sum."""
        ...


@dataclass(frozen=True)
class RmsNorm:
    """``offset`` is added to the weight."""

    weight: Tensor
    eps: float
    offset: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return ops.rmsnorm(x, self.weight, self.eps, offset=self.offset, weights_ready=True)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return ops.add_rmsnorm(
            x, residual, self.weight, self.eps, offset=self.offset, weights_ready=True
        )

    def quantized(
        self, x: Tensor, residual: Tensor | None = None, *, codes: OutQuant = "fp8"
    ) -> Codes:
        """The norm, or that of :meth:`add`, in the pass that quantises it."""
        if residual is None:
            result = ops.rmsnorm(
                x, self.weight, self.eps, offset=self.offset, out_quant=codes, weights_ready=True
            )
        else:
            result = ops.add_rmsnorm(
                x,
                residual,
                self.weight,
                self.eps,
                offset=self.offset,
                out_quant=codes,
                weights_ready=True,
            )
        return Codes(*result, x.dtype)


@dataclass(frozen=True)
class LayerNorm:
    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return ops.layernorm(x, self.weight, self.bias, self.eps, weights_ready=True)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(residual.add_(x))
