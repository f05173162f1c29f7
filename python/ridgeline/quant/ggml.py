"""Blocks of GGUF files to codes or values, on any device.

Source: ggml's ``block_q4_0``, ``block_q8_0``, ``block_q4_K`` and ``block_q6_K``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.quant.stored import GroupedCodes

Q4_0_GROUP = 32  # columns that share a scale


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, ``[..., 1]``."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(bytes_: Tensor) -> Tensor:
    """``[..., n]`` to ``[..., 2, n]``: the low nibbles, then the high ones."""
    return torch.stack((bytes_ & 15, bytes_ >> 4), -2)


def q4_0(data: Tensor) -> GroupedCodes:
    """``[N, bytes]``: blocks of 32 columns, ``(q - 8) * d``."""
    blocks = data.unflatten(-1, (-1, 18))
    q = _nibbles(blocks[..., 2:]).flatten(-3)
    return GroupedCodes(q, _half(blocks, 0)[..., 0].t())


def q8_0(data: Tensor) -> Tensor:
    """Blocks of 32 columns, ``q * d``."""
    blocks = data.unflatten(-1, (-1, 34))
    return (blocks[..., 2:].view(torch.int8).float() * _half(blocks, 0).float()).flatten(-2)


def q4_k(data: Tensor) -> Tensor:
    """Blocks of 256 columns, eight groups: ``q * (d * s) - dmin * m``; s and m have 6 bits."""
    blocks = data.unflatten(-1, (-1, 144))
    low, middle, high = blocks[..., 4:16].split(4, -1)
    s = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), -1)
    m = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), -1)
    scale = (_half(blocks, 0).float() * s.float()).unsqueeze(-1)
    minimum = (_half(blocks, 2).float() * m.float()).unsqueeze(-1)
    q = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).flatten(-3, -2)
    return (q.float() * scale - minimum).flatten(-3)


def q6_k(data: Tensor) -> Tensor:
    """Blocks of 256 columns, sixteen groups: ``(q - 32) * (d * s)`` with ``s`` of 8 bits."""
    blocks = data.unflatten(-1, (-1, 210))
    # Half h, quarter j, column l: bits 0 to 3 of nibble [h, j / 2, j % 2, l], 4 and 5 of qh.
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))
    low = torch.stack((low & 15, low >> 4), -3).flatten(-3, -2)
    shifts = torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8, device=data.device)
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts) & 3
    q = (low | (high << 4)).to(torch.int8) - 32
    s = blocks[..., 192:208].contiguous().view(torch.int8).float()
    scale = (_half(blocks, 208).float() * s).unsqueeze(-1)
    return (scale * q.unflatten(-1, (2, 16)).flatten(-4, -2).float()).flatten(-3)


EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": q8_0, "Q4_K": q4_k, "Q6_K": q6_k}
