"""What the products of a layer were given: sums that scales and codes are chosen by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.models.decoder import Layer
from ridgeline.models.expert_linear import ExpertLinear
from ridgeline.models.linear import Linear
from ridgeline.models.norms import Codes, RmsNorm


@dataclass
class Moments:
    """Of the inputs ``x [tokens, K]`` of one product, float32.

    Attributes:
        count: tokens. total: ``[K]``, the sum of magnitudes. largest: ``[K]``.
        product: ``[K, K]``, the sum of ``x x^T``; None: it was not asked for.
    """

    count: int
    total: Tensor
    largest: Tensor
    product: Tensor | None

    @classmethod
    def empty(cls, K: int, device: torch.device, *, product: bool) -> Moments:
        none = torch.zeros(K, device=device)
        return cls(0, none, none, torch.zeros(K, K, device=device) if product else None)

    def add(self, x: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).float()
        if not len(x):
            return
        self.count += len(x)
        self.total = self.total + x.abs().sum(0)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        if self.product is not None:
            self.product.addmm_(x.t(), x)

    def divide(self, factors: Tensor) -> None:
        """The inputs' columns are divided from now on."""
        self.total, self.largest = self.total / factors, self.largest / factors
        if self.product is not None:
            self.product.div_(factors[:, None]).div_(factors)


@dataclass(frozen=True)
class _Watched:
    """A ``Linear`` whose inputs are added up."""

    linear: Linear
    moments: Moments

    folded_rows = 0
    unit = "bf16"
    codes = None

    def __call__(
        self,
        x: Tensor | Codes,
        activation: str | None = None,
        *,
        norm: RmsNorm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(x, Tensor) and norm is None
        self.moments.add(x)
        return self.linear(x, activation, residual=residual)


@dataclass(frozen=True)
class _WatchedExperts:
    linear: ExpertLinear
    moments: list[Moments]

    unit = "bf16"

    @property
    def experts(self) -> int:
        return self.linear.experts

    def __call__(
        self, x: Tensor, offsets: Tensor, rows: Tensor | None, activation: str | None
    ) -> Tensor:
        ends, given = offsets.tolist(), x if rows is None else x[rows]
        for moments, low, high in zip(self.moments, ends, ends[1:]):
            moments.add(given[low:high])
        return self.linear(x, offsets, rows, activation)


def watch(
    layer: Layer, columns: Mapping[str, int], device: torch.device, *, product: bool
) -> tuple[Layer, dict[str, list[Moments]]]:
    """The layer with its products watched, and by their kind what they see from now on.

    Args:
        columns: kind ("qkv", "expert_up") -> columns of the weight.

    Returns:
        The layer, and one ``Moments`` a product, or one an expert.
    """
    seen: dict[str, list[Moments]] = {}

    def empty(kind: str, count: int = 1) -> list[Moments]:
        seen[kind] = [Moments.empty(columns[kind], device, product=product) for _ in range(count)]
        return seen[kind]

    changed: dict[str, Any] = {}
    for kind in ("qkv", "output", "up", "down"):
        linear = getattr(layer, kind)
        if linear is not None:
            changed[kind] = _Watched(linear, empty(kind)[0])
    if layer.experts is not None:
        up, down = layer.experts.up, layer.experts.down
        changed["experts"] = replace(
            layer.experts,
            up=_WatchedExperts(up, empty("expert_up", up.experts)),
            down=_WatchedExperts(down, empty("expert_down", down.experts)),
        )
    return replace(layer, **changed), seen
