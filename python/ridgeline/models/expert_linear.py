"""Weights of the products of experts behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.models.linear import Codes, pack_int4
from ridgeline.models.stored_linear import packed_int4
from ridgeline.quant.stored import (
    FP8_BLOCK,
    Expanded,
    Fp4Codes,
    GroupedCodes,
    ScaledCodes,
    Weight,
    dense,
)


class ExpertLinear(Protocol):
    """``act(x[rows] @ weight.T + bias)``, the weight that of each row's expert.

    ``offsets``, ``rows``, ``activation``: those of ``ops.grouped_linear``.
    """

    @property
    def experts(self) -> int: ...

    @property
    def unit(self) -> str:
        """As of :class:`ridgeline.models.linear.Linear`."""
        ...

    def __call__(
        self, x: Tensor, offsets: Tensor, rows: Tensor | None, activation: str | None
    ) -> Tensor: ...


@dataclass(frozen=True)
class DenseExperts:
    """The weights as they are: ``[experts, out, in]``."""

    weight: Tensor
    bias: Tensor | None
    batch_invariant: bool = False

    unit = "bf16"

    @property
    def experts(self) -> int:
        return len(self.weight)

    def __call__(
        self, x: Tensor, offsets: Tensor, rows: Tensor | None, activation: str | None
    ) -> Tensor:
        return ops.grouped_linear(
            x,
            self.weight,
            offsets,
            rows=rows,
            bias=self.bias,
            activation=activation,
            batch_invariant=self.batch_invariant,
        )


@dataclass(frozen=True)
class _PackedExpertLinear:
    """Four-bit weights, times inputs as they are. ``product``: the op, called as
    ``ops.grouped_linear`` is."""

    weight: Any
    bias: Tensor | None
    batch_invariant: bool = False

    unit: ClassVar[str] = "bf16"
    product: ClassVar[Callable[..., Tensor]]

    @property
    def experts(self) -> int:
        return len(self.weight.packed)

    def __call__(
        self, x: Tensor, offsets: Tensor, rows: Tensor | None, activation: str | None
    ) -> Tensor:
        return self.product(
            x,
            self.weight,
            offsets,
            rows=rows,
            bias=self.bias,
            activation=activation,
            batch_invariant=self.batch_invariant,
        )


@dataclass(frozen=True)
class Int4ExpertLinear(_PackedExpertLinear):
    """Integers with a scale for each group of inputs."""

    weight: ops.Int4Experts
    product = staticmethod(ops.grouped_int4_linear)


@dataclass(frozen=True)
class Fp4ExpertLinear(_PackedExpertLinear):
    """Floats with a power of two for 32 inputs: MXFP4."""

    weight: ops.Fp4Experts
    product = staticmethod(ops.grouped_fp4_linear)


# Rows an expert in the mean up to which inputs stay as they are, of weights with a scale a row and
# with scales of blocks: their product takes no longer, and no kernel quantises them. H200, lab, us,
# of bf16 and of e4m3, top 8 in 128 experts of 2048 x 1536, 32 and 64 tokens: a scale a row 83.5
# 95.6 and 84.3 96.8; scales of blocks, 64 and 96 tokens: 95.6 110.7 and 98.3 105.7; but of 768 x
# 2048, 48 tokens, a scale a row 52.9 and 49.5.
_FEW_ROWS, _FEW_BY_BLOCKS = 2, 4


@dataclass(frozen=True)
class Fp8ExpertLinear:
    """fp8 weights with a scale for each output, or for each block of 128 x 128, times inputs
    quantised here: with a scale a token, or with one for 128 columns of it. Few rows stay as they
    are. Where bits may not depend on their number, all by blocks do, and no others.

    Attributes:
        weight_only: inputs stay as they are.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    batch_invariant: bool = False
    weight_only: bool = False

    @property
    def experts(self) -> int:
        return len(self.weight)

    @property
    def unit(self) -> str:
        return "bf16" if self.weight_only else "fp8"

    def _scales(self, rows: int) -> Literal["row", "group"] | None:
        """What so many rows of inputs are quantised with; None: they stay as they are."""
        by_blocks = self.scale.dim() == 3
        few = (_FEW_BY_BLOCKS if by_blocks else _FEW_ROWS) * self.experts
        stay = by_blocks if self.batch_invariant else rows <= few
        if self.weight_only or stay:
            return None
        return "group" if by_blocks else "row"

    def _operands(
        self, x: Tensor | Codes, rows: Tensor | None, activation: str | None
    ) -> dict[str, Any]:
        """Of the product; inputs are quantised where they are to be."""
        values, x_scale = (x, None) if isinstance(x, Tensor) else (x.values, x.scale)
        if isinstance(x, Tensor):
            scales = self._scales(len(x if rows is None else rows))
            if scales is not None:
                values, x_scale = ops.quantize_fp8(x, scales)
        return {
            "x": values,
            "weight": self.weight,
            "weight_scale": self.scale,
            "rows": rows,
            "bias": self.bias,
            "x_scale": x_scale,
            "out_dtype": x.dtype,
            "activation": activation,
            "batch_invariant": self.batch_invariant,
        }

    def __call__(
        self, x: Tensor | Codes, offsets: Tensor, rows: Tensor | None, activation: str | None
    ) -> Tensor:
        operands = self._operands(x, rows, activation)
        return ops.grouped_fp8_linear(offsets=offsets, **operands)

    def codes_for(
        self, following: Fp8ExpertLinear, x: Tensor, offsets: Tensor, rows: Tensor, activation: str
    ) -> Codes | None:
        """``act(self(x))`` as ``following`` would quantise it; None where it would not."""
        if following._scales(len(rows)) != "group":
            return None
        operands = self._operands(x, rows, activation)
        made = ops.grouped_fp8_linear(offsets=offsets, **operands, out_quant="fp8_group")
        return Codes(*made, x.dtype)


def make_experts(
    weight: Weight,
    bias: Tensor | None,
    experts: int,
    dtype: torch.dtype,
    quantization: str | None,
    batch_invariant: bool = False,
    keeps_fp4: bool = True,
) -> tuple[ExpertLinear, str | None]:
    """Of the rows of all experts, and why they could not be quantised, if they could not."""
    bias = None if bias is None else bias.unflatten(0, (experts, -1))
    reason = None
    if isinstance(weight, Fp4Codes):
        of_experts = _fp4(weight, experts, dtype) if keeps_fp4 else None
        if of_experts is not None:
            return Fp4ExpertLinear(of_experts, bias, batch_invariant), None
        weight = weight.in_eight_bits()  # the same values
    try:
        if isinstance(weight, Tensor):
            reason = None if quantization is None else "there is no product of experts with int8"
            if quantization in ("int4", "w4a8"):  # no product of experts has 4 bits by 8
                return _int4(pack_int4(weight), experts, bias, batch_invariant), None
            if quantization == "fp8":
                codes = ScaledCodes(*ops.quantize_fp8(weight, "row"))
                return _fp8(codes, experts, bias, batch_invariant), None
        elif isinstance(weight, Expanded):
            reason = weight.reason
        elif isinstance(weight, GroupedCodes) and weight.bits == 4:
            return _int4(packed_int4(weight, dtype), experts, bias, batch_invariant), None
        elif isinstance(weight, ScaledCodes) and _is_fp8(weight):
            return _fp8(weight, experts, bias, batch_invariant), None
        else:
            reason = "there is no product of experts with 8-bit integers or such blocks of scales"
    except ValueError as error:
        reason = str(error)
    stacked = dense(weight, dtype).unflatten(0, (experts, -1))
    return DenseExperts(stacked, bias, batch_invariant), reason


def _is_fp8(weight: ScaledCodes) -> bool:
    blocks = (None, (FP8_BLOCK, FP8_BLOCK))
    return weight.block in blocks and weight.codes.dtype == torch.float8_e4m3fn


def _int4(
    weight: ops.Int4Weight, experts: int, bias: Tensor | None, batch_invariant: bool
) -> Int4ExpertLinear:
    of_experts = ops.Int4Experts.from_rows(weight, experts)
    if of_experts.N % 32 != 0:
        raise ValueError(f"weight: expected rows divisible by 32, got {of_experts.N} an expert")
    return Int4ExpertLinear(of_experts, bias, batch_invariant)


def _fp4(weight: Fp4Codes, experts: int, dtype: torch.dtype) -> ops.Fp4Experts | None:
    """None: no product takes them. CUDA has none of float16, which lacks most powers of two."""
    blocks = weight.blocks.unflatten(0, (experts, -1))
    if dtype == torch.float16 or blocks.shape[1] % 32 != 0:
        return None
    try:
        return ops.Fp4Experts.from_mxfp4(blocks, weight.exponents.unflatten(0, (experts, -1)))
    except ValueError:  # exponents that the ops do not take
        return None


def _fp8(
    weight: ScaledCodes, experts: int, bias: Tensor | None, batch_invariant: bool
) -> Fp8ExpertLinear:
    codes, scale = weight.codes, weight.scale
    if codes.shape[1] % 16 != 0:
        raise ValueError(f"weight: expected columns divisible by 16, got {codes.shape[1]}")
    if weight.block is None:
        scale = scale.flatten()
    elif codes.shape[0] % (experts * FP8_BLOCK) != 0:
        rows = codes.shape[0] // experts
        raise ValueError(f"weight: expected rows divisible by {FP8_BLOCK}, got {rows} an expert")
    scale = scale.expand(experts) if scale.numel() == 1 else scale.unflatten(0, (experts, -1))
    codes = codes.unflatten(0, (experts, -1))
    return Fp8ExpertLinear(codes, scale.contiguous(), bias, batch_invariant, weight.weight_only)
