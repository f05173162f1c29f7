"""A module is made from one that computes the same, not from what has the same attributes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from ridgeline.nn import (
    Attention,
    GatedMLP,
    LayerNorm,
    LayerNormGELU,
    Linear,
    Linear4bit,
    LinearFP8,
    LinearInt8,
    RMSNorm,
)

LINEAR, NORM = nn.Linear(8, 8), nn.LayerNorm(8)
CALLS: dict[str, Callable[[], object]] = {
    "norm: expected torch's RMSNorm, got LayerNorm": lambda: RMSNorm.from_torch(NORM),
    "norm: expected torch's LayerNorm, got RMSNorm": lambda: LayerNorm.from_torch(nn.RMSNorm(8)),
    "norm: expected torch's LayerNorm, got Linear": lambda: LayerNormGELU.from_torch(LINEAR),
    "gelu: expected torch's GELU, got SiLU": lambda: LayerNormGELU.from_torch(NORM, nn.SiLU()),
    "linear: expected .* got LayerNorm": lambda: LinearFP8.from_torch(nn.LayerNorm((4, 8))),
    "linear: expected .* got Embedding": lambda: LinearInt8.from_torch(nn.Embedding(4, 8)),
    "linear: expected .* got Conv1d": lambda: Linear4bit.from_torch(nn.Conv1d(8, 8, 1)),
    "linear: expected torch's Linear or ridgeline's Linear, got NoneType": lambda: (
        Linear.from_torch(None)
    ),
    "down: expected .* got Identity": lambda: GatedMLP.from_torch(LINEAR, LINEAR, nn.Identity()),
    "attention: expected torch's Multi.* got Linear": lambda: Attention.from_torch(LINEAR),
}


@pytest.mark.parametrize("message", CALLS)
def test_what_only_looks_alike_is_refused(message: str):
    with pytest.raises(TypeError, match=message):
        CALLS[message]()
