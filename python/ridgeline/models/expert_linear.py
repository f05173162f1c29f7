"""Weights of the products of experts behind one interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.models.linear import Codes, pack_int4
from ridgeline.models.stored_linear import packed_int4
from ridgeline.quant.stored import FP8_BLOCK, Expanded, GroupedCodes, ScaledCodes, Weight, dense


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
class Int4ExpertLinear:
    """Four-bit weights with a scale for each group of inputs."""

    weight: ops.Int4Experts
    bias: Tensor | None
    batch_invariant: bool = False

    unit = "bf16"

    @property
    def experts(self) -> int:
        return len(self.weight.packed)

    def __call__(
        self, x: Tensor, offsets: Tensor, rows: Tensor | None, activation: str | None
    ) -> Tensor:
        return ops.grouped_int4_linear(
            x,
            self.weight,
            offsets,
            rows=rows,
            bias=self.bias,
            activation=activation,
            batch_invariant=self.batch_invariant,
        )


# Rows an expert in the mean up to which inputs of weights with scales of blocks stay as they are:
# the product takes no longer, and no kernel quantises them. H200, lab, us, the product of bf16 and
# of e4m3, top 8 in 128 experts of 2048 x 1536: 64 tokens 95.6 and 98.3, 96 tokens 110.7 and 105.7.
_FEW_ROWS = 4


@dataclass(frozen=True)
class Fp8ExpertLinear:
    """fp8 weights with a scale for each output, times inputs quantised here with a scale a token;
    or with a scale for each block of 128 x 128, times inputs quantised with a scale for 128 columns
    of a token, but where rows are few or bits may not depend on their number.

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

    def _has_groups(self, rows: int) -> bool:
        """Whether so many rows of inputs are quantised with a scale for 128 columns."""
        by_blocks = not self.weight_only and self.scale.dim() == 3
        return by_blocks and not self.batch_invariant and rows > _FEW_ROWS * self.experts

    def _operands(
        self, x: Tensor | Codes, rows: Tensor | None, activation: str | None
    ) -> dict[str, Any]:
        """Of the product; inputs are quantised where they are to be."""
        values, x_scale = (x, None) if isinstance(x, Tensor) else (x.values, x.scale)
        if isinstance(x, Tensor) and not self.weight_only:
            if self.scale.dim() < 3:
                values, x_scale = ops.quantize_fp8(x, "row")
            elif self._has_groups(len(x if rows is None else rows)):
                values, x_scale = ops.quantize_fp8(x, "group")
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
        if not following._has_groups(len(rows)):
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
) -> tuple[ExpertLinear, str | None]:
    """Of the rows of all experts, and why they could not be quantised, if they could not."""
    bias = None if bias is None else bias.unflatten(0, (experts, -1))
    reason = None
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
