"""The bytes an op must move and the operations it must do, as functions of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Cost:
    """The least work of one call: each input read once, each output written once.

    Attributes:
        bytes: bytes through device memory.
        flops: floating-point operations; a multiply-add counts two.
        unit: the unit that does them: "fp32", "bf16", "fp8" or "int8".
    """

    bytes: int
    flops: int
    unit: str = "fp32"


CostFunction = Callable[..., Cost]
_COSTS: dict[str, CostFunction] = {}


def cost_of(name: str) -> Callable[[CostFunction], CostFunction]:
    """Registers the cost function of the op ``name``; it takes the op's Python arguments."""

    def register(function: CostFunction) -> CostFunction:
        assert name not in _COSTS, f"{name} has a cost function already"
        _COSTS[name] = function
        return function

    return register


def costed_ops() -> tuple[str, ...]:
    """Names of all ops that have a cost function."""
    return tuple(sorted(_COSTS))


def op_cost(name: str, /, *args: Any, **kwargs: Any) -> Cost:
    """The cost of ``ridgeline.ops.<name>(*args, **kwargs)``.

    Raises:
        KeyError: no op of that name has a cost function.
    """
    if name not in _COSTS:
        raise KeyError(f"no cost function for {name!r}; there are: {', '.join(costed_ops())}")
    return _COSTS[name](*args, **kwargs)


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the tensors' elements; None counts nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
