"""Checks of device tensors' contents, which cost a synchronisation and are off by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_enabled: ContextVar[bool] = ContextVar("ridgeline_debug_checks", default=False)


@contextmanager
def debug_checks(enabled: bool = True) -> Iterator[None]:
    """Inside this context CUDA ops check ids and lengths as the CPU ops always do.

    Each check reads the tensor back and so waits for the stream: not for use in a CUDA graph or in
    production. Without it an id out of range reads block 0 and writes nothing.
    """
    token = _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.reset(token)


def check_ids(
    name: str, ids: Tensor | None, high: Callable[[], int], low: Callable[[], int] = int
) -> None:
    """Under :func:`debug_checks`, refuses a CUDA tensor with a value outside [low, high).

    The limits are asked for only then: they are sizes of tensors that the op has yet to check.

    Raises:
        ValueError: names the tensor, the range and the first value outside it.
    """
    if not isinstance(ids, Tensor) or not ids.is_cuda or torch.compiler.is_compiling():
        return  # the CPU ops check for themselves; a compiled graph cannot raise on contents
    if not _enabled.get() or ids.numel() == 0:
        return
    try:
        first, end = low(), high()
    except IndexError:
        return  # the op says which tensor has too few dimensions
    outside = ((ids < first) | (ids >= end)).flatten()
    if bool(outside.any()):
        index = int(outside.int().argmax())
        value = int(ids.flatten()[index])
        raise ValueError(f"{name}: expected values in [{first}, {end}), got {value} at {index}")
