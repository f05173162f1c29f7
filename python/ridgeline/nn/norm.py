"""Norms over the last dimension."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ridgeline import ops
from ridgeline.nn.kinds import expect_kind
from ridgeline.nn.rows import rows_of


def expect_one_dimension(norm: nn.LayerNorm | nn.RMSNorm) -> nn.Parameter:
    """The weight of a norm over the last dimension alone.

    Raises:
        ValueError: it normalises more, or has no weight.
    """
    if len(norm.normalized_shape) != 1 or norm.weight is None:
        raise ValueError(
            "normalized_shape: expected one dimension and elementwise_affine, got "
            f"{tuple(norm.normalized_shape)}{'' if norm.weight is not None else ' without weight'}"
        )
    return norm.weight


def default_eps(weight: Tensor) -> float:
    """What ``eps=None`` means to PyTorch, by a trial: its versions and backends differ.

    That of the dtype or that of float32, in which the mean is taken: for 1e-3 throughout, the norm
    is far below 1 or near it.
    """
    x = torch.full((1, 8), 1e-3, dtype=weight.dtype, device=weight.device)
    far = nn.functional.rms_norm(x, (8,)).max().item() < 0.5
    return torch.finfo(weight.dtype if far else torch.float32).eps


class RMSNorm(nn.Module):
    """:func:`ridgeline.ops.rmsnorm` with its weight, ``[dim]``; ``offset`` 1.0: Gemma's."""

    def __init__(self, dim: int, eps: float = 1e-6, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    @classmethod
    def from_torch(cls, norm: nn.RMSNorm) -> RMSNorm:
        """Shares the weight."""
        expect_kind("norm", norm, nn.RMSNorm)
        weight = expect_one_dimension(norm)
        module = cls(1, default_eps(weight) if norm.eps is None else norm.eps)
        module.weight = weight
        return module

    def forward(self, x: Tensor) -> Tensor:
        return ops.rmsnorm(
            rows_of(x), self.weight, self.eps, offset=self.offset, weights_ready=True
        )


class LayerNorm(nn.Module):
    """:func:`ridgeline.ops.layernorm` with weight and bias, ``[dim]``."""

    bias: nn.Parameter | None

    def __init__(self, dim: int, eps: float = 1e-5, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.eps = eps

    def share(self, norm: nn.LayerNorm) -> None:
        """Takes the parameters of ``norm``."""
        self.weight, self.bias = expect_one_dimension(norm), norm.bias

    @classmethod
    def from_torch(cls, norm: nn.LayerNorm) -> LayerNorm:
        expect_kind("norm", norm, nn.LayerNorm)
        module = cls(1, norm.eps)
        module.share(norm)
        return module

    def forward(self, x: Tensor) -> Tensor:
        return ops.layernorm(rows_of(x), self.weight, self.bias, self.eps, weights_ready=True)


class LayerNormGELU(LayerNorm):
    """:func:`ridgeline.ops.layernorm_gelu`: the GELU of a layer norm, in one pass."""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        approximate: Literal["none", "tanh"] = "none",
    ) -> None:
        super().__init__(dim, eps, bias=bias)
        self.approximate = approximate

    @classmethod
    def from_torch(cls, norm: nn.LayerNorm, gelu: nn.GELU | None = None) -> LayerNormGELU:
        """The two modules as one; without ``gelu`` the exact one."""
        expect_kind("norm", norm, nn.LayerNorm)
        if gelu is not None:
            expect_kind("gelu", gelu, nn.GELU)
        approximate = "none" if gelu is None else gelu.approximate
        if approximate not in ("none", "tanh"):
            raise ValueError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
        module = cls(1, norm.eps, approximate=approximate)  # type: ignore[arg-type]
        module.share(norm)
        return module

    def forward(self, x: Tensor) -> Tensor:
        return ops.layernorm_gelu(
            rows_of(x), self.weight, self.bias, self.eps, self.approximate, weights_ready=True
        )
