"""Ridgeline inside other libraries; each part is imported where it is first named."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = ["sdpa", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        try:
            return import_module(f"{__name__}.{name}")
        except ImportError as error:
            raise ImportError(f"ridgeline.integrations.{name}: {error}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
