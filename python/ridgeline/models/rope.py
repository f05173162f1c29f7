"""The table of rotary angles that ``ops.rope`` and ``ops.rope_write_kv`` read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ridgeline.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair, float32 ``[head_dim / 2]``.

    "llama3" divides the slow frequencies by ``factor``, keeps the fast ones and blends those in
    between, as transformers' ``_compute_llama3_parameters`` does.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        span = rope.high_freq_factor - rope.low_freq_factor
        fast = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
        return fast * frequencies + (1 - fast) * frequencies / rope.factor
    return frequencies


def cos_sin_table(rope: RopeConfig, head_dim: int, max_position: int) -> Tensor:
    """Float32 ``[max_position, head_dim]``: the cosines of a position, then its sines."""
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=1)
