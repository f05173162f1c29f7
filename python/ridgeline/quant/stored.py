"""Quantised weights as checkpoints mean them: codes and scales, in no op's layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ridgeline.ops._nibbles import low_nibbles_first
from ridgeline.ops.fp4_weight import e2m1_values

FP8_BLOCK = 128  # rows and columns that share a scale in the blocks of fp8_linear

_E8M0_BIAS = _FLOAT32_BIAS = 127
_FLOAT32_MANTISSA = 23
_MOST_FINITE = 125  # exponent by which the largest float of 4 bits is one of 32
_E4M3_TOP, _E4M3_BOTTOM = 6, -8
"""Powers of two by which e4m3 has each value of e2m1: up to 6 * 2**6, from 0.5 * 2**-8 on."""
_ROWS_AT_ONCE = 8192  # as indices of a table codes take much


@dataclass(frozen=True)
class GroupedCodes:
    """``value = (q - zero) * scale``, one scale and zero point a row and group of columns.

    Attributes:
        q: uint8 ``[N, K]``, below ``2 ** bits``.
        scales: floating ``[groups, N]``.
        zeros: uint8 ``[groups, N]``; None: ``2 ** (bits - 1)``.
        group_index: ``[K]``, the group of each column; None: groups of equal size, in order.
        bits: 4 or 8.
        fp8_inputs: the format means inputs in fp8, a scale a token, not of 16 bits.
    """

    q: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    group_index: Tensor | None = None
    bits: int = 4
    fp8_inputs: bool = False

    def rows(self, index: Tensor) -> GroupedCodes:
        """The rows ``index`` of the weight, in this order."""
        zeros = None if self.zeros is None else self.zeros[:, index]
        return replace(self, q=self.q[index], scales=self.scales[:, index], zeros=zeros)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """``[N, K]``: the product in float32, rounded once."""
        groups = self.group_index
        if groups is None:
            columns = self.q.shape[1] // max(self.scales.shape[0], 1)
            groups = torch.arange(self.q.shape[1], device=self.q.device) // max(columns, 1)
        groups = groups.long()
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros.float()[groups].t()
        values = self.q.float().sub_(zeros)
        del zeros
        return values.mul_(self.scales.float()[groups].t()).to(dtype)


@dataclass(frozen=True)
class ScaledCodes:
    """``value = code * scale``.

    Attributes:
        codes: float8_e4m3fn or int8 ``[N, K]``.
        scale: float32; ``[1]``, ``[N]``, or one a block: ``[ceil(N / b0), ceil(K / b1)]``.
        block: ``(b0, b1)`` where blocks have scales.
        weight_only: the format means inputs of 16 bits, not of 8.
    """

    codes: Tensor
    scale: Tensor
    block: tuple[int, int] | None = None
    weight_only: bool = False

    def rows(self, index: Tensor) -> ScaledCodes | Expanded:
        if self.block is not None:
            values = self.dequantize(torch.float32)[index]
            return Expanded(values, "rows that are stored in another order share a block's scale")
        # float8 has no gather on every device.
        codes = self.codes.view(torch.uint8)[index].view(self.codes.dtype)
        scale = self.scale[index] if self.scale.numel() > 1 else self.scale
        return replace(self, codes=codes, scale=scale)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """``[N, K]``: the product in float32, rounded once."""
        scale = self.scale
        if self.block is not None:
            N, K = self.codes.shape
            scale = scale.repeat_interleave(self.block[0], 0)[:N]
            scale = scale.repeat_interleave(self.block[1], 1)[:, :K]
        elif scale.numel() > 1:
            scale = scale[:, None]
        return (self.codes.float() * scale).to(dtype)


@dataclass(frozen=True)
class Expanded:
    """A weight in a format that has no exact counterpart here: its values, and why."""

    values: Tensor
    reason: str

    def rows(self, index: Tensor) -> Expanded:
        return replace(self, values=self.values[index])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)


@dataclass(frozen=True)
class Fp4Codes:
    """4-bit floats, 32 columns to a power of two: MXFP4.

    Attributes:
        blocks: uint8 ``[N, K / 32, 16]``, two codes a byte, low nibble first.
        exponents: uint8 ``[N, K / 32]``, plus 127; of a group of zeros any.
    """

    blocks: Tensor
    exponents: Tensor

    def rows(self, index: Tensor) -> Fp4Codes:
        return Fp4Codes(self.blocks[index], self.exponents[index])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """``[N, K]``: exact in float32, rounded once."""
        return self._times(self.exponents, dtype)

    def in_eight_bits(self) -> ScaledCodes | Expanded:
        """The same values in e4m3 with a power of two a row, where a row's largest and smallest
        exponent are 14 apart at most; else in 16 bits."""
        of_rows = self._row_exponents()
        if of_rows is None:
            reason = "exponents of 4-bit floats are too far apart in a row"
            return Expanded(self.dequantize(torch.bfloat16), reason)
        top = of_rows + _E4M3_TOP + _E8M0_BIAS
        within = self.exponents.int().minimum(top) - of_rows  # beyond are groups of zeros
        codes = self._times(within, torch.float8_e4m3fn)
        scale = ((of_rows + _FLOAT32_BIAS) << _FLOAT32_MANTISSA).view(torch.float32)
        return ScaledCodes(codes, scale.flatten(), weight_only=True)

    def no_zeros(self) -> Tensor:
        """``[N, K / 32]``: whether any value of a group is not 0."""
        return ((self.blocks & 0x77) != 0).any(-1)

    def _times(self, biased: Tensor, dtype: torch.dtype) -> Tensor:
        """The codes' values times powers of two, integers ``[N, K / 32]`` plus 127."""
        rows, groups, bytes_ = self.blocks.shape
        made = torch.empty((rows, groups * bytes_ * 2), dtype=dtype, device=self.blocks.device)
        for start in range(0, rows, _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            values = e2m1_values(low_nibbles_first(self.blocks[some]))
            powers = biased[some].int() - _E8M0_BIAS
            made[some] = torch.ldexp(values, powers.unsqueeze(-1)).flatten(-2).to(dtype)
        return made

    def _row_exponents(self) -> Tensor | None:
        """``[N, 1]``, the power of two of each row's scale with which its values are e4m3, exactly.
        None: of some row they are not."""
        exponents, no_zeros = self.exponents.int() - _E8M0_BIAS, self.no_zeros()
        high = exponents.masked_fill(~no_zeros, -_E8M0_BIAS).amax(-1, keepdim=True)
        high = torch.where(no_zeros.any(-1, keepdim=True), high, _E4M3_TOP)
        low = torch.where(no_zeros, exponents, high).amin(-1, keepdim=True)
        fits = (high - low <= _E4M3_TOP - _E4M3_BOTTOM) & (high > -100) & (high <= _E8M0_BIAS)
        return high - _E4M3_TOP if bool(fits.all()) else None


Weight = Tensor | GroupedCodes | ScaledCodes | Fp4Codes | Expanded


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight's values, whatever it is stored as."""
    return weight.to(dtype) if isinstance(weight, Tensor) else weight.dequantize(dtype)


def is_finite(weight: Weight) -> bool:
    """Whether the weight has neither NaN nor infinity."""
    if isinstance(weight, GroupedCodes):
        weight = weight.scales
    elif isinstance(weight, ScaledCodes):
        is_int, scale = weight.codes.dtype == torch.int8, weight.scale
        weight = scale if is_int else weight.dequantize(torch.float32)
    elif isinstance(weight, Fp4Codes):
        exponents = weight.exponents.where(weight.no_zeros(), 0)
        return bool((exponents <= _MOST_FINITE + _E8M0_BIAS).all())
    elif isinstance(weight, Expanded):
        weight = weight.values
    return bool(torch.isfinite(weight).all())


def stack(parts: Sequence[Weight], dtype: torch.dtype) -> Weight:
    """The rows of all parts as one weight; expanded where their formats or scales do not join."""
    if len(parts) == 1:
        return parts[0]
    joined: Weight | None = None
    if all(isinstance(part, GroupedCodes) for part in parts):
        joined = _stack_groups([part for part in parts if isinstance(part, GroupedCodes)])
    elif all(isinstance(part, ScaledCodes) for part in parts):
        joined = _stack_scaled([part for part in parts if isinstance(part, ScaledCodes)])
    elif all(isinstance(part, Fp4Codes) for part in parts):
        fp4 = [part for part in parts if isinstance(part, Fp4Codes)]
        joined = Fp4Codes(
            torch.cat([part.blocks for part in fp4]), torch.cat([part.exponents for part in fp4])
        )
    if joined is not None:
        return joined
    values = torch.cat([dense(part, dtype) for part in parts])
    reasons = {part.reason for part in parts if isinstance(part, Expanded)}
    if all(isinstance(part, Tensor) for part in parts):
        return values
    if all(isinstance(part, Expanded) for part in parts) and len(reasons) == 1:
        return Expanded(values, reasons.pop())
    return Expanded(values, "stacked from parts whose formats, groups or column orders differ")


def _stack_groups(parts: Sequence[GroupedCodes]) -> GroupedCodes | None:
    first = parts[0]
    for part in parts[1:]:
        same_groups = part.scales.shape[0] == first.scales.shape[0] and part.bits == first.bits
        if not same_groups or not _same(part.group_index, first.group_index):
            return None
        assert part.fp8_inputs == first.fp8_inputs  # one configuration says it of all
    zeros = None
    if any(part.zeros is not None for part in parts):
        middle = 1 << (first.bits - 1)
        zeros = torch.cat(
            [
                torch.full_like(p.scales, middle, dtype=torch.uint8) if p.zeros is None else p.zeros
                for p in parts
            ],
            1,
        )
    q, scales = torch.cat([p.q for p in parts]), torch.cat([p.scales for p in parts], 1)
    return replace(first, q=q, scales=scales, zeros=zeros)


def _stack_scaled(parts: Sequence[ScaledCodes]) -> ScaledCodes | None:
    first = parts[0]
    if any(p.codes.dtype != first.codes.dtype or p.block != first.block for p in parts):
        return None
    if first.block is not None:
        if any(len(part.codes) % first.block[0] for part in parts[:-1]):
            return None
        scale = torch.cat([part.scale for part in parts])
    elif all(part.scale.numel() == 1 and torch.equal(part.scale, first.scale) for part in parts):
        scale = first.scale
    else:
        scale = torch.cat([part.scale.expand(len(part.codes)) for part in parts])
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
    return replace(first, codes=codes.view(first.codes.dtype), scale=scale)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
