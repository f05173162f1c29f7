"""``Linear``s of weights that came quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.models.linear import (
    DenseLinear,
    Fp8Linear,
    Int8Linear,
    Linear,
    WeightOnlyFp8Linear,
    linear_of_int4,
)
from ridgeline.models.norms import RmsNorm
from ridgeline.quant.stored import FP8_BLOCK, Expanded, Fp4Codes, GroupedCodes, ScaledCodes


@dataclass(frozen=True)
class BlockFp8Linear:
    """fp8 weights with a scale for each block of 128 x 128, times inputs quantised here, a scale
    for 128 columns of a token: as models trained in fp8 are meant to be run.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    batch_invariant: bool = False

    folded_rows = 8
    unit = "fp8"
    codes = None

    def __call__(
        self,
        x: Any,
        activation: str | None = None,
        *,
        norm: RmsNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(x, Tensor)
        codes, x_scale = ops.quantize_fp8(x if norm is None else norm(x), "group")
        return ops.fp8_linear(
            codes,
            self.weight,
            self.scale,
            self.bias,
            x_scale=x_scale,
            out_dtype=x.dtype,
            activation=activation,
            residual=residual,
            batch_invariant=self.batch_invariant,
            weights_ready=True,
        )


def stored_linear(
    weight: GroupedCodes | ScaledCodes | Fp4Codes | Expanded,
    bias: Tensor | None,
    dtype: torch.dtype,
    batch_invariant: bool,
) -> tuple[Linear, str | None]:
    """A ``Linear`` of the weight, and why it could not stay quantised, if it could not.

    4-bit integers, fp8 and int8 keep their codes; scales of 4-bit integers take ``dtype``.
    """
    if isinstance(weight, Fp4Codes):  # only experts are multiplied in 4-bit floats
        weight = weight.in_eight_bits()
    reason = "there is no product with groups of 8-bit integers"
    if isinstance(weight, Expanded):
        reason = weight.reason
    elif isinstance(weight, GroupedCodes) and weight.bits == 4:
        try:
            packed, fp8_inputs = packed_int4(weight, dtype), weight.fp8_inputs
            return linear_of_int4(packed, bias, batch_invariant, fp8_inputs=fp8_inputs), None
        except ValueError as error:
            reason = str(error)
    elif isinstance(weight, ScaledCodes):
        codes, scale = weight.codes, weight.scale.contiguous()
        is_int8 = codes.dtype == torch.int8
        if weight.block is None and weight.weight_only:
            return WeightOnlyFp8Linear(codes, scale, bias, batch_invariant), None
        if weight.block is None:
            kind = Int8Linear if is_int8 else Fp8Linear
            return kind(codes, scale, bias, batch_invariant), None
        if weight.block == (FP8_BLOCK, FP8_BLOCK) and not is_int8:
            return BlockFp8Linear(codes, scale, bias, batch_invariant), None
        wanted = "int8 has none" if is_int8 else "not 128 x 128"
        reason = f"scales of {weight.block[0]} x {weight.block[1]} blocks, {wanted}"
    return DenseLinear(weight.dequantize(dtype).contiguous(), bias, batch_invariant), reason


def packed_int4(weight: GroupedCodes, dtype: torch.dtype) -> ops.Int4Weight:
    """The 4-bit weight in the ops' layout.

    Raises:
        ValueError: its groups are none that the ops take.
    """
    zeros = weight.zeros
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None  # what no zero points mean; they would be read for nothing
    return ops.Int4Weight.from_quantized(
        weight.q, weight.scales.to(dtype), zeros, weight.group_index
    )
