"""The layout of 4-bit weights, ``Int4Layout`` in ``csrc/kernels/gemm.h``, whatever codes mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS, _COLS = 16, 64

# Axes of the packed order: a row is (block, register row, lane row), a column is
# (block, fragment, register column, lane column, element): the nibble of register
# (column half h, row half r) and element e is 2 h + r + 4 e.
_PACKED_AXES = (0, 3, 2, 6, 4, 7, 5, 1)
_NATURAL_AXES = (0, 7, 2, 1, 4, 6, 3, 5)


def packed_shape(N: int, K: int) -> tuple[int, int, int, int]:
    """Of what :func:`pack_nibbles` makes."""
    return -(-N // _ROWS), -(-K // _COLS), 32, 4


def low_nibbles_first(packed: Tensor) -> Tensor:
    """``[..., bytes]`` as files have them to ``[..., 2 * bytes]``."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_nibbles(q: Tensor, padding: int) -> Tensor:
    """Integers 0 to 15, ``[N, K]``, to int32 ``[ceil(N / 16), ceil(K / 64), 32, 4]``."""
    N, K = q.shape
    padded = F.pad(q.to(torch.uint8), (0, -K % _COLS, 0, -N % _ROWS), value=padding)
    rows, cols = padded.shape[0] // _ROWS, padded.shape[1] // _COLS
    # [n, r, g, k, f, h, t, e] -> [n, k, g, t, f, e, h, r]
    nibbles = padded.view(rows, 2, 8, cols, 4, 2, 4, 2).permute(_PACKED_AXES)
    nibbles = nibbles.reshape(rows, cols, 32, 4, 4, 2).to(torch.uint8)
    bytes_ = nibbles[..., 0] | (nibbles[..., 1] << 4)
    return bytes_.contiguous().view(torch.int32).view(rows, cols, 32, 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of :func:`pack_nibbles`, with the padding, uint8."""
    rows, cols = packed.shape[:2]
    bytes_ = packed.contiguous().view(torch.uint8).view(rows, cols, 8, 4, 4, 2, 2)
    # The last axis of a word's eight nibbles is (e, h, r): two nibbles a byte, the low one first.
    nibbles = torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1)
    nibbles = nibbles.reshape(rows, cols, 8, 4, 4, 2, 2, 2)
    return nibbles.permute(_NATURAL_AXES).reshape(rows * _ROWS, cols * _COLS)
