"""Fakes of ops: shapes and dtypes of what they return, for PyTorch's transforms and "meta"."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

_Fake = TypeVar("_Fake", bound=Callable[..., Any])


def register_fake(op: str) -> Callable[[_Fake], _Fake]:
    """Registers the fake of ``ridgeline::op``, which refuses "meta" beside another device.

    PyTorch calls it for any tensor on "meta": beside real ones it would return memory that nothing
    has written.
    """
    schema = getattr(torch.ops.ridgeline, op).default._schema
    names = [argument.name for argument in schema.arguments]

    def register(fake: _Fake) -> _Fake:
        @wraps(fake)
        def checked(*args: Any) -> Any:
            tensors = [(n, x) for n, x in zip(names, args, strict=True) if isinstance(x, Tensor)]
            for name, x in tensors:
                first, like = tensors[0]
                if (x.device.type == "meta") != (like.device.type == "meta"):
                    raise ValueError(
                        f"{name}: expected on the device of {first}, {like.device}, got {x.device}"
                    )
            return fake(*args)

        torch.library.register_fake(f"ridgeline::{op}")(checked)
        return fake

    return register
