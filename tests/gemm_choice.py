"""The choice of a product's kernel, as ``gemm_plan`` and ``grouped_plan`` tell it without a GPU."""

from __future__ import annotations

from typing import Any

import torch


def choice_of(
    M: int,
    N: int,
    K: int,
    format: str = "dense",
    *,
    dtype: str = "bfloat16",
    activation: str = "none",
    library: bool = True,
    invariant: bool = False,
    hopper: bool = True,
    chained: bool = False,
    norm: bool = False,
    sms: int = 132,
    residual: bool = False,
) -> dict[str, Any]:
    """``path``, the kernel's name, and what else there is of it, as numbers."""
    text = torch.ops.ridgeline.gemm_plan(
        M, N, K, dtype, format, activation, library, invariant, hopper, chained, norm, sms, residual
    )
    path, *fields = text.split()
    return {"path": path} | {name: int(value) for name, value in (f.split("=") for f in fields)}


def plan_of_experts(
    M: int,
    experts: int,
    N: int,
    K: int,
    format: str = "dense",
    *,
    dtype: str = "bfloat16",
    activation: str = "none",
    gathered: bool = False,
    invariant: bool = False,
    hopper: bool = True,
    group: int = 128,
    zeros: bool = False,
    sms: int = 132,
) -> str:
    plan: str = torch.ops.ridgeline.grouped_plan(
        M, experts, N, K, dtype, format, activation, gathered, invariant, hopper, group, zeros, sms
    )
    return plan


def choice_of_experts(*args: Any, **options: Any) -> dict[str, Any]:
    """``path``, and what else there is of it: numbers as such."""
    path, *fields = plan_of_experts(*args, **options).split()
    pairs = (field.split("=") for field in fields)
    return {"path": path} | {k: int(v) if v.isdigit() else v for k, v in pairs}


# N, K, rows of each expert, and whether they are gathered, of dense tiles of 256 weight rows: all
# numbers that those multiply whole, one to three tiles of an expert, and tiles that are claimed.
WIDE = [
    (2064, K, counts, gathered)
    for K, counts, gathered in [
        (4096, [0, 1, 64, 72, 95, 105, 120, 137], False),
        (4096, [0, 1, 64, 72, 95, 105, 120, 137], True),
        (4096, [150, 160, 161, 176, 250, 330, 3, 33], False),
        (4096, [150, 160, 161, 176, 250, 330, 3, 33], True),
        (8192, [161, 480, 320, 359], False),
    ]
]

# Four experts with so many rows in the mean, and the rows of the tiles that they meet: N, K.
TALL_SHAPE = (5600, 640)
TALL_TILES = [
    ("int4", 90, 96),
    ("int4", 106, 112),
    ("int4", 120, 128),
    ("int4_zeros", 80, 96),
    ("int4_zeros", 120, 128),
    ("int4_groups", 80, 96),
    ("int4_groups", 120, 128),
    ("fp4", 80, 96),
    ("fp4", 120, 128),
]
