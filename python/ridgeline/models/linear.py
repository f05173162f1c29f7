"""Weights of a matrix product behind one interface: call it with ``x [tokens, in]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.models.norms import Codes, RmsNorm
from ridgeline.ops._out_quant import OutQuant

QUANTIZATIONS = ("int4", "w4a8", "fp8", "int8")

_ADDED = 1 << 22
"""Elements of 128 tiles of an fp8 product: of fewer several blocks may share one, which then cannot
be added to the residual as it is stored."""

_GATED_ROWS = 2048
"""Rows of a gated fp8 product that becomes codes in its kernel: of fewer, pairs of tiles may leave
SMs idle for longer than quantising takes."""


class Linear(Protocol):
    """``act(norm(x) @ weight.T + bias) + residual`` for ``x [tokens, in]``, in the dtype of ``x``.

    ``activation``: that of ``ops.linear``.
    """

    @property
    def folded_rows(self) -> int:
        """Up to so many rows norm and residual add no kernel to the product's on Hopper, but of
        int4 from five rows on where rows have more than 4096 columns or groups less than 128."""
        ...

    @property
    def unit(self) -> str:
        """Of :class:`ridgeline.roofline.machine.Roofs`: who multiplies many rows."""
        ...

    @property
    def codes(self) -> OutQuant | None:
        """What ``x`` may be instead, as ``Codes``: else it would be quantised here."""
        ...

    def __call__(
        self,
        x: Tensor | Codes,
        activation: str | None = None,
        *,
        norm: RmsNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class DenseLinear:
    """The weight as it is: ``[out, in]``."""

    weight: Tensor
    bias: Tensor | None
    batch_invariant: bool = False

    folded_rows = 8
    unit = "bf16"
    codes = None

    def __call__(
        self,
        x: Tensor | Codes,
        activation: str | None = None,
        *,
        norm: RmsNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(x, Tensor)
        fused = _fused(self, activation, norm, residual)
        return ops.linear(x, self.weight, self.bias, **fused)


@dataclass(frozen=True)
class Int4Linear:
    """Four-bit weights with a scale for each group of inputs, times inputs as they are."""

    weight: ops.Int4Weight
    bias: Tensor | None
    batch_invariant: bool = False

    folded_rows = 8
    unit: ClassVar[str] = "bf16"
    codes: ClassVar[Literal["fp8"] | None] = None

    def __call__(
        self,
        x: Tensor | Codes,
        activation: str | None = None,
        *,
        norm: RmsNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        fused = _fused(self, activation, norm, residual)
        if isinstance(x, Tensor):
            return ops.int4_linear(x, self.weight, self.bias, act=self.codes, **fused)
        assert self.codes is not None and x.dtype == self.weight.scales.dtype
        return ops.int4_linear(x.values, self.weight, self.bias, x_scale=x.scale, **fused)


@dataclass(frozen=True)
class W4A8Linear(Int4Linear):
    """Four-bit weights with a scale for each group of inputs, times inputs in fp8 with a scale a
    token, quantised here or where they are made."""

    unit: ClassVar[str] = "fp8"
    codes: ClassVar[Literal["fp8"] | None] = "fp8"


@dataclass(frozen=True)
class WeightOnlyFp8Linear:
    """fp8 weights with a scale for each output, times inputs as they are."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    batch_invariant: bool = False

    folded_rows = 8
    unit = "bf16"
    codes = None

    def __call__(
        self,
        x: Tensor | Codes,
        activation: str | None = None,
        *,
        norm: RmsNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(x, Tensor)
        fused = _fused(self, activation, norm, residual)
        return ops.fp8_linear(x, self.weight, self.scale, self.bias, **fused)


@dataclass(frozen=True)
class Fp8Linear:
    """fp8 weights with a scale for each output, times inputs quantised here, a scale a token, or
    where they are made, with scales of 256 columns (:meth:`codes_for`)."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    batch_invariant: bool = False

    folded_rows = 8
    unit: ClassVar[str] = "fp8"
    codes: ClassVar[OutQuant] = "fp8"

    def _product(self, x: Codes, **fused: Any) -> Tensor:
        return ops.fp8_linear(
            x.values,
            self.weight,
            self.scale,
            self.bias,
            x_scale=x.scale,
            out_dtype=x.dtype,
            **fused,
        )

    def __call__(
        self,
        x: Tensor | Codes,
        activation: str | None = None,
        *,
        norm: RmsNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        fused = _fused(self, activation, norm, residual)
        if isinstance(x, Tensor):
            return ops.fp8_linear(x, self.weight, self.scale, self.bias, quantize_x=True, **fused)
        return self._product(x, **fused)

    def adds(self, rows: int) -> bool:
        """Whether so many rows are better added here than by the norm behind them: not where bits
        may not depend on their number, for then no kernel adds."""
        return not self.batch_invariant and rows * self.weight.shape[0] >= _ADDED

    def add(self, x: Tensor | Codes, residual: Tensor) -> None:
        """``residual += self(x)``, with the same bits."""
        values, scale = (x.values, x.scale) if isinstance(x, Codes) else (x, None)
        ops.fp8_linear_add(
            *(values, self.weight, self.scale, residual, self.bias),
            x_scale=scale,
            quantize_x=scale is None,
            batch_invariant=self.batch_invariant,
            weights_ready=True,
        )

    def codes_for(self, following: Fp8Linear, x: Codes, activation: str) -> Codes | None:
        """``act(self(x))`` as codes that ``following`` adds to the residual, with finer scales than
        a token's: 256 columns have one. None on GPUs other than Hopper, whose kernels do not make
        them, and of few rows, where quantising apart takes less."""
        device, inner = x.values.device, following.weight.shape[1]
        if device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0):
            return None
        if activation != "silu_mul" or inner % 256 or inner == 256 or self.codes != "fp8":
            return None
        if self.bias is not None or following.bias is not None or x.dtype != torch.bfloat16:
            return None
        if x.values.shape[0] < _GATED_ROWS:
            return None
        values, scale = ops.fp8_linear(
            *(x.values, self.weight, self.scale),
            x_scale=x.scale,
            out_dtype=x.dtype,
            activation=activation,
            out_quant="fp8_group256",
            weights_ready=True,
        )
        return Codes(values, scale, x.dtype)


@dataclass(frozen=True)
class Int8Linear(Fp8Linear):
    """int8 weights with a scale for each output, times inputs quantised here, a scale a token."""

    unit: ClassVar[str] = "int8"
    codes: ClassVar[OutQuant] = "int8"

    def adds(self, rows: int) -> bool:
        return False

    def __call__(
        self,
        x: Tensor | Codes,
        activation: str | None = None,
        *,
        norm: RmsNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if norm is not None:
            assert isinstance(x, Tensor)
            x = norm.quantized(x, codes=self.codes)
        elif isinstance(x, Tensor):
            x = Codes(*ops.quantize_int8(x), x.dtype)
        return self._product(x, **_fused(self, activation, None, residual))

    def _product(self, x: Codes, **fused: Any) -> Tensor:
        return ops.int8_linear(
            x.values,
            self.weight,
            self.scale,
            self.bias,
            x_scale=x.scale,
            out_dtype=x.dtype,
            **fused,
        )


def _fused(
    linear: DenseLinear | Int4Linear | WeightOnlyFp8Linear | Fp8Linear,
    activation: str | None,
    norm: RmsNorm | None,
    residual: Tensor | None,
) -> dict[str, Any]:
    """What all products take beside their operands."""
    fused: dict[str, Any] = {
        "activation": activation,
        "residual": residual,
        "batch_invariant": linear.batch_invariant,
        "weights_ready": True,
    }
    if norm is not None:
        fused |= {"norm_weight": norm.weight, "norm_eps": norm.eps}
    return fused


def int4_group(columns: int) -> int:
    """Columns that share a scale where a weight is quantised while loading: 128, or 64 or 32 where
    these divide them and 128 does not."""
    return next((group for group in (128, 64) if columns % group == 0), 32)


def pack_int4(weight: Tensor) -> ops.Int4Weight:
    """Rounds to nearest, symmetrically."""
    return ops.pack_int4(weight, int4_group(weight.shape[1]))


def meets_fp8(group: int, columns: int, *, zero_points: bool = False) -> bool:
    """Whether Hopper multiplies such a 4-bit weight by fp8 inputs in 8 bits. Of others it expands
    both to 16 bits, so that nothing is gained by rounding the inputs."""
    return (group % 128 == 0 or group == columns) and not zero_points


def linear_of_int4(
    weight: ops.Int4Weight, bias: Tensor | None, batch_invariant: bool, *, fp8_inputs: bool
) -> Int4Linear:
    """``fp8_inputs``: they are wanted; of weights that do not meet them they stay as they are."""
    meets = meets_fp8(weight.group, weight.K, zero_points=weight.zeros is not None)
    return (W4A8Linear if fp8_inputs and meets else Int4Linear)(weight, bias, batch_invariant)


def make_linear(
    weight: Tensor, bias: Tensor | None, *, quantization: str | None, batch_invariant: bool
) -> Linear:
    """A ``Linear`` of ``weight [out, in]``, quantised here unless ``quantization`` is None."""
    if quantization is None:
        return DenseLinear(weight, bias, batch_invariant)
    if quantization in ("int4", "w4a8"):
        fp8_inputs = quantization == "w4a8"
        return linear_of_int4(pack_int4(weight), bias, batch_invariant, fp8_inputs=fp8_inputs)
    if quantization == "int8":
        codes, scale = ops.quantize_int8(weight)
        return Int8Linear(codes, scale.flatten(), bias, batch_invariant)
    assert quantization == "fp8", quantization
    return Fp8Linear(*ops.quantize_fp8(weight, "row"), bias, batch_invariant)
