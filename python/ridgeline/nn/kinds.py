"""Modules that others are made from."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def expect_kind(name: str, module: object, *kinds: type) -> None:
    """What only has the same attributes may compute something else.

    Raises:
        TypeError: the module is of none of these classes.
    """
    if not isinstance(module, kinds):
        expected = " or ".join(
            f"{kind.__module__.split('.')[0]}'s {kind.__name__}" for kind in kinds
        )
        raise TypeError(f"{name}: expected {expected}, got {type(module).__name__}")


def stacked_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Modules that keep the weights of ``num_experts`` experts in parameters of three dimensions,
    as ``transformers`` does: names, modules and weights ``[experts, ., .]``."""
    for name, module in model.named_modules():
        experts = getattr(module, "num_experts", None)
        weights = [
            weight
            for weight in module.parameters(recurse=False)
            if weight.dim() == 3 and len(weight) == experts
        ]
        if weights:
            yield name, module, weights
