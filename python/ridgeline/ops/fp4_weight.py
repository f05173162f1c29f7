"""Weights of experts in 4-bit floats: packing and unpacking, in plain torch on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.ops._nibbles import (
    low_nibbles_first,
    pack_nibbles,
    packed_shape,
    unpack_nibbles,
)

FP4_GROUP = 32
"""Columns that share a power of two."""

_BLOCK_BYTES, _CODE_BYTES, _STRIP = 544, 512, 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127

# Exponents. The product of 2^126, of which Hopper's kernels make weights, and of a bfloat16 ends
# above; the smallest normal number is below.
_LOWEST, _HIGHEST = -126, 1

# The bits of a word of nibbles that go elsewhere together: how far left, and a mask of where from.
_MOVES = (
    (6, 0x00070007),
    (12, 0x00080008),
    (8, 0x00700070),
    (14, 0x00000080),
    (-18, 0x00800000),
    (-8, 0x07000700),
    (-2, 0x38003800),
    (-10, 0x40004000),
    (4, 0x00008000),
    (-28, 0x80000000),
)
_MOVES_BACK = tuple((-left, mask << left if left > 0 else mask >> -left) for left, mask in _MOVES)


@dataclass(frozen=True)
class Fp4Experts:
    """Weights ``[experts, N, K]`` in 4-bit floats (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
    negatives), each times a power of two that 32 columns share: MXFP4.

    Attributes:
        packed: uint8 ``[experts, ceil(N / 16), ceil(K / 64), 544]``, one layout for every device
            (``Fp4Layout`` in ``csrc/kernels/gemm.h``) of codes, which are a sign, two bits of
            exponent and one of mantissa, and of the powers' exponents: 4.25 bits a weight.
        N, K: rows and columns of one expert.

    Source: OCP, "Microscaling Formats", 2023.
    """

    packed: Tensor
    N: int
    K: int

    @classmethod
    def from_mxfp4(cls, blocks: Tensor, scales: Tensor) -> Fp4Experts:
        """Packs codes as files of gpt-oss have them; no value changes.

        Args:
            blocks: uint8 ``[experts, N, K / 32, 16]``, two codes a byte, low nibble first.
            scales: uint8 ``[experts, N, K / 32]``, e8m0: exponents plus 127. Of a group of zeros
                it may be any.

        Raises:
            ValueError: dtypes or shapes differ from the above, or exponents are not from -126 to
                1; the message names the argument.
        """
        _expect(
            blocks.dtype == torch.uint8 and blocks.dim() == 4 and blocks.shape[3] == FP4_GROUP // 2,
            "blocks: expected uint8 [experts, N, K / 32, 16], "
            f"got {blocks.dtype} {list(blocks.shape)}",
        )
        experts, N, groups, _ = blocks.shape
        _expect(
            scales.dtype == torch.uint8 and scales.shape == blocks.shape[:3],
            f"scales: expected uint8 {list(blocks.shape[:3])}, "
            f"got {scales.dtype} {list(scales.shape)}",
        )
        K, device = groups * FP4_GROUP, blocks.device
        down, across, *_ = packed_shape(N, K)
        shape = (experts, down, across, _BLOCK_BYTES)
        packed = torch.empty(shape, dtype=torch.uint8, device=device)
        for e in range(experts):  # all at once would take several times the weights
            words = blocks[e]
            codes = low_nibbles_first(words).view(N, K)
            no_zeros = ((words & 0x77) != 0).any(-1)
            biased = torch.where(no_zeros, scales[e], _BIAS)
            _expect_exponents(biased)
            moved = _moved(pack_nibbles(codes, 0), _MOVES)
            packed[e, ..., :_CODE_BYTES] = moved.view(torch.uint8).view(down, across, _CODE_BYTES)
            padded = F.pad(biased, (0, -groups % 2, 0, -N % _STRIP), value=_BIAS)
            by_rows = padded.view(down, _STRIP, across, 2)
            packed[e, ..., _CODE_BYTES:] = by_rows.permute(0, 2, 3, 1).flatten(-2)
        return cls(packed, N, K)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weights that the op multiplies by, ``[experts, N, K]``; in bfloat16 and float32
        nothing is rounded."""
        shape, device = (len(self.packed), self.N, self.K), self.packed.device
        values = torch.empty(shape, dtype=dtype, device=device)
        for e, packed in enumerate(self.packed):
            words = packed[..., :_CODE_BYTES].contiguous().view(torch.int32).unflatten(-1, (32, 4))
            codes = unpack_nibbles(_moved(words, _MOVES_BACK))[: self.N, : self.K]
            biased = packed[..., _CODE_BYTES:].unflatten(-1, (2, _STRIP)).permute(0, 3, 1, 2)
            powers = (biased.flatten(2).flatten(0, 1).int() << 23).view(torch.float32)
            of_columns = powers.repeat_interleave(FP4_GROUP, 1)[: self.N, : self.K]
            values[e] = e2m1_values(codes) * of_columns
        return values


def e2m1_values(codes: Tensor) -> Tensor:
    """The float32 of 4-bit floats: a sign, two bits of exponent, one of mantissa."""
    values = torch.tensor(_E2M1, dtype=torch.float32, device=codes.device)
    return torch.cat((values, -values))[codes.int()]


def _moved(words: Tensor, moves: tuple[tuple[int, int], ...]) -> Tensor:
    """Words of int32, whose bits move."""
    wide = words.long() & 0xFFFFFFFF
    moved = torch.zeros_like(wide)
    for left, mask in moves:
        bits = wide & mask
        moved |= bits << left if left > 0 else bits >> -left
    return moved.int()


def _expect(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


def _expect_exponents(biased: Tensor) -> None:
    if biased.numel() == 0:
        return
    low, high = (int(value) - _BIAS for value in biased.aminmax())
    _expect(
        _LOWEST <= low and high <= _HIGHEST,
        f"scales: expected exponents from {_LOWEST} to {_HIGHEST}, got {low} to {high}",
    )
