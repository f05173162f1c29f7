"""Weights of experts in 4-bit floats: packing and unpacking, in plain torch on any device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.ops._nibbles import pack_nibbles, packed_shape, unpack_nibbles

FP4_GROUP = 32
"""Columns that share a power of two."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS, _MANTISSA = 127, 23  # of e8m0 and of float32, whose exponents are the same bits

# Exponents of scales. Bfloat16's product with 2^126, of which Hopper's kernels make weights, ends
# above; the smallest normal number is below. Float16 has every half of 2^-23.
_LOWEST = {torch.bfloat16: -126, torch.float32: -126, torch.float16: -23}
_HIGHEST = 1


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
        packed: int32 ``[experts, ceil(N / 16), ceil(K / 64), 32, 4]``, one layout for every device
            (``Fp4Layout`` in ``csrc/kernels/gemm.h``) of codes: a sign, two bits of exponent, one
            of mantissa. Rows and columns beyond the matrix have code 0.
        scales: ``[experts, K / 32, N]``, powers of two from 2^-126 to 2; the dtype of the output:
            bfloat16, on the CPU float16 (from 2^-23 on) and float32 too.
        N, K: rows and columns of one expert.

    Source: OCP, "Microscaling Formats", 2023.
    """

    packed: Tensor
    scales: Tensor
    N: int
    K: int

    @classmethod
    def from_mxfp4(
        cls, blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> Fp4Experts:
        """Packs codes as files of gpt-oss have them; no value changes.

        Args:
            blocks: uint8 ``[experts, N, K / 32, 16]``, two codes a byte, low nibble first.
            scales: uint8 ``[experts, N, K / 32]``, e8m0: exponents plus 127. Of a group of zeros
                it may be any.
            dtype: of the scales, and so of the output.

        Raises:
            ValueError: dtypes or shapes differ from the above, or exponents are not from -126
                (float16: -23) to 1; the message names the argument.
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
        _expect(dtype in _LOWEST, f"dtype: expected bfloat16, float16 or float32, got {dtype}")
        K, device = groups * FP4_GROUP, blocks.device
        packed = torch.empty((experts, *packed_shape(N, K)), dtype=torch.int32, device=device)
        powers = torch.empty((experts, groups, N), dtype=dtype, device=device)
        for e in range(experts):  # all at once would take several times the weights
            words = blocks[e]
            codes = torch.stack((words & 15, words >> 4), -1).view(N, K)
            no_zeros = ((words & 0x77) != 0).any(-1)
            biased = torch.where(no_zeros, scales[e], _BIAS)
            _expect_exponents(biased, _LOWEST[dtype])
            packed[e] = _moved(pack_nibbles(codes, 0), _MOVES)
            powers[e] = (biased.int() << _MANTISSA).view(torch.float32).t()
        return cls(packed, powers, N, K)

    def dequantize(self) -> Tensor:
        """The weights that the op multiplies by, ``[experts, N, K]`` in the dtype of the scales;
        nothing is rounded."""
        shape, scales = (len(self.packed), self.N, self.K), self.scales
        table = torch.tensor(_E2M1, dtype=torch.float32, device=scales.device)
        table = torch.cat((table, -table))
        values = torch.empty(shape, dtype=scales.dtype, device=scales.device)
        for e, packed in enumerate(self.packed):
            codes = unpack_nibbles(_moved(packed, _MOVES_BACK))[: self.N, : self.K]
            of_columns = scales[e].float().repeat_interleave(FP4_GROUP, 0)[: self.K]
            values[e] = table[codes.int()] * of_columns.t()
        return values


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


def _expect_exponents(biased: Tensor, lowest: int) -> None:
    if biased.numel() == 0:
        return
    low, high = (int(value) - _BIAS for value in biased.aminmax())
    _expect(
        lowest <= low and high <= _HIGHEST,
        f"scales: expected exponents from {lowest} to {_HIGHEST}, got {low} to {high}",
    )
