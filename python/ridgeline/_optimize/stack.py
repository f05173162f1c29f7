"""Products that read one input, stacked into one; their own weights become views of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline import ops
from ridgeline._optimize.swap import BOUND, Stranger, fused_of, is_bare
from ridgeline.nn.linear import (
    Linear,
    Linear4bit,
    LinearFP8,
    LinearInt8,
    LinearW4A8,
    Product,
    at_rest,
    dense_product,
)
from ridgeline.nn.rows import rows_of

_KINDS = (nn.Linear, Linear, Linear4bit, LinearW4A8, LinearFP8, LinearInt8)


class _Dense(Product):
    """Stacked rows in a buffer: neither a parameter of the model nor part of its state."""

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def product(self, x: Tensor, **fused: object) -> Tensor:
        return dense_product(x, self.weight, self.bias, **fused)


def is_product(module: Stranger) -> bool:
    """A linear layer that the ops compute, and nothing around it."""
    if type(module) not in _KINDS:
        return False
    if isinstance(module, LinearInt8) and module.outliers is not None:
        return False  # its columns are two products
    if dtype_of(module) not in BOUND:
        return False
    weight = module.scales if isinstance(module, Linear4bit) else module.weight
    plain = weight.device.type in ("cpu", "cuda") and type(weight.data) is Tensor
    return is_bare(module) and plain and has_rows(weight, module.bias)


def has_rows(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the ops read these strides."""
    return rows_of(weight) is weight and (bias is None or bias.is_contiguous())


def product(module: Stranger, x: Tensor, **fused: object) -> Tensor:
    """The product of what :func:`is_product` accepts."""
    if isinstance(module, nn.Linear):
        return dense_product(x, module.weight, module.bias, **fused)
    return module.product(x, **fused)


def dtype_of(module: Stranger) -> torch.dtype:
    """Of inputs and outputs."""
    if isinstance(module, LinearFP8):
        return module.dtype
    weight = module.scales if isinstance(module, Linear4bit) else module.weight
    return weight.dtype


def stacked(parts: Sequence[Stranger]) -> Product | str:
    """One product of all rows, in order; or why there is none. The parts are not changed yet."""
    first = parts[0]
    same = {(type(p), p.in_features, dtype_of(p), p.bias is None) for p in parts}
    if len(same) > 1:
        return "its projections differ in kind, input, dtype or bias"
    bias = None if first.bias is None else torch.cat([p.bias.detach() for p in parts])
    if isinstance(first, Linear4bit):
        weights = [p.weight for p in parts]
        fits = all(
            w.group == weights[0].group and w.N % 16 == 0 and w.perm is None for w in weights
        )
        if not fits or len({w.zeros is None for w in weights}) > 1:
            return "its 4-bit projections differ in group, or have rows or an order of their own"
        rows = sum(w.N for w in weights)
        zeros = None if weights[0].zeros is None else torch.cat([w.zeros for w in weights], 1)
        weight = ops.Int4Weight(
            packed=torch.cat([w.packed for w in weights]),
            scales=torch.cat([w.scales for w in weights], 1),
            zeros=zeros,
            perm=None,
            N=rows,
            K=weights[0].K,
            group=weights[0].group,
        )
        return type(first)(weight, bias, persistent=False)
    rows_of = torch.cat([p.weight.detach() for p in parts])
    if isinstance(first, LinearFP8):
        if any(p.weight_scale.shape != (p.out_features,) or p.dynamic != first.dynamic
               for p in parts):  # fmt: skip
            return "its 8-bit projections do not have a scale for each output"
        scale = torch.cat([p.weight_scale for p in parts])
        kind = {"dynamic": first.dynamic, "persistent": False}
        return type(first)(rows_of, scale, bias, dtype=first.dtype, **kind)
    return _Dense(rows_of, bias)


def restack(module: Stranger, _keys: Any = None) -> None:
    """After a state was loaded into a module with a stack: what was assigned is not part of it, and
    the scales of 4-bit weights are held twice. Captured graphs read where it is."""
    whole, parts = fused_of(module), [module._modules[key] for key in module.ridgeline_swap.stacks]
    fresh = stacked(parts)
    if isinstance(fresh, str):
        raise RuntimeError(f"{type(module).__name__}: {fresh}: undo() what optimize_ did first")
    for key, new in fresh.named_buffers():
        own = whole._buffers[key]
        assert own is not None
        if (own.dtype, own.device) == (new.dtype, new.device):
            own.copy_(new)
        else:
            whole._buffers[key] = new
    at_rest(*whole.buffers())
    share(whole, parts)


def share(whole: Product, parts: Sequence[Stranger]) -> None:
    """Makes the weights of the parts views of the stack, so that nothing is kept twice.

    The scales of a 4-bit weight, a thirtieth of it, stay: their slices are not contiguous.
    """
    row = 0
    for part in parts:
        rows = part.out_features
        if isinstance(whole, Linear4bit):
            part.packed = whole.packed[row // 16 : (row + rows) // 16]
        else:
            assert isinstance(whole.weight, Tensor)
            part.weight.data = whole.weight[row : row + rows]
            if isinstance(whole, LinearFP8):
                part.weight_scale = whole.weight_scale[row : row + rows]
        if whole.bias is not None:
            part.bias.data = whole.bias[row : row + rows]
        row += rows
