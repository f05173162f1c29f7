"""Modules that others are made from."""

from __future__ import annotations


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
