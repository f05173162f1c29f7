"""Inputs as modules of PyTorch take them, for ops that say which strides they read."""

from __future__ import annotations

from torch import Tensor


def rows_of(x: Tensor) -> Tensor:
    """``x`` if its rows are contiguous and at one stride, as the ops have them, else a copy."""
    if x.is_contiguous():
        return x
    following = None
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1])):
        if size != 1:
            if following not in (None, stride):
                return x.contiguous()
            following = stride * size
    return x if x.stride(-1) == 1 else x.contiguous()
