"""The choice of a product's kernel, as ``gemm_plan`` tells it without a GPU."""

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
) -> dict[str, Any]:
    """``path``, the kernel's name, and what else there is of it, as numbers."""
    text = torch.ops.ridgeline.gemm_plan(
        M, N, K, dtype, format, activation, library, invariant, hopper, chained, norm, sms
    )
    path, *fields = text.split()
    return {"path": path} | {name: int(value) for name, value in (f.split("=") for f in fields)}
