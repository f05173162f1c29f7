"""Norms, linear layers, MLPs and rows of modules."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline import ops
from ridgeline._optimize.stack import dtype_of, has_rows, is_product, product, share, stacked
from ridgeline._optimize.swap import (
    BOUND,
    Stranger,
    Swap,
    disagreement,
    fused_of,
    is_bare,
    large,
    plan_of,
    probe,
    weights_beside,
)
from ridgeline.nn.linear import Product
from ridgeline.nn.mlp import gated_product
from ridgeline.nn.norm import default_eps
from ridgeline.nn.rows import rows_of

_EPS = ("variance_epsilon", "eps", "epsilon", "layer_norm_eps")
_ACTIVATION = ("act_fn", "activation_fn", "act", "activation", "intermediate_act_fn")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_GATED_STACKED = (("gate_up_proj", "down_proj"),)
_PLAIN = (
    ("fc1", "fc2"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("lin1", "lin2"),
    ("up_proj", "down_proj"),
    ("dense", None),
)
_KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


def _of_x_alone(forward: Callable[[Stranger, Tensor], Any]) -> Callable[..., Any]:
    """A call with a name or anything else beside it is for the module's own forward: what else it
    takes was not tried."""

    @wraps(forward)
    def call(self: Stranger, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1:
            return type(self).forward(self, *args, **kwargs)
        return forward(self, args[0])

    return call


# ---- Norms --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormPlan:
    """``offset`` None: a layer norm."""

    eps: float
    offset: float | None


def _has_op(weight: Tensor, x: Tensor) -> bool:
    """Whether the ops take these dtypes together: a residual may be wider than the weights."""
    return x.dtype in BOUND and weight.dtype in (x.dtype, torch.float32)


@_of_x_alone
def _rms_forward(self: Stranger, x: Tensor) -> Tensor:
    if not _has_op(self.weight, x):
        return type(self).forward(self, x)
    plan = plan_of(self)
    return ops.rmsnorm(rows_of(x), self.weight, plan.eps, offset=plan.offset, weights_ready=True)


@_of_x_alone
def _layer_forward(self: Stranger, x: Tensor) -> Tensor:
    if not _has_op(self.weight, x):
        return type(self).forward(self, x)
    eps = plan_of(self).eps
    return ops.layernorm(rows_of(x), self.weight, self.bias, eps, weights_ready=True)


def norm(module: Stranger, dtype: torch.dtype) -> Swap | str | None:
    """A norm over the last dimension, whatever its class is called."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    if weight is None or weight.dim() != 1 or next(module.children(), None) is not None:
        return None
    eps = next((e for e in (getattr(module, key, None) for key in _EPS) if e is not None), None)
    if eps is None and isinstance(module, nn.RMSNorm):
        eps = default_eps(weight)
    if not isinstance(eps, float) or set(parameters) - {"weight", "bias"}:
        return None
    if isinstance(module, nn.LayerNorm) or "bias" in parameters:
        swaps = [Swap("layernorm", _layer_forward, NormPlan(eps, None))]
    else:
        swaps = [Swap("rmsnorm", _rms_forward, NormPlan(eps, offset)) for offset in (0.0, 1.0)]
    # Rows of different size: in the small one eps counts, in the large one it does not.
    x = probe(weight, 3, weight.shape[0], dtype=torch.float32)
    x *= torch.tensor([[1.0], [1e-3], [30.0]], device=x.device)
    for swap in swaps:
        reasons = {disagreement(module, swap, x.to(kind)) for kind in {dtype, weight.dtype}}
        if reasons == {None}:
            return swap
    return next(reason for reason in reasons if reason is not None)


# ---- Products -----------------------------------------------------------------------------------


@_of_x_alone
def _linear_forward(self: Stranger, x: Tensor) -> Tensor:
    return product(self, x)


def linear(module: Stranger, dtype: torch.dtype) -> Swap | str | None:
    """``nn.Linear``; our own need no swap."""
    if not isinstance(module, nn.Linear):
        return None
    if module.weight.dtype not in BOUND:
        return f"no op for {module.weight.dtype}"
    if not has_rows(module.weight, module.bias):
        return "its weight or bias is not contiguous"
    if not is_product(module):
        return f"a {type(module).__name__} may do more than a linear layer, or has hooks"
    return Swap("linear", _linear_forward)


def kind_of(activation: Any) -> str | None:
    """The name in the ops of an activation, by what it computes."""
    if not callable(activation):
        return None
    x = torch.linspace(-6, 6, 241, device="cpu")
    try:
        y = activation(x)
    except Exception:  # a callable that is something else
        return None
    for name, function in _KINDS.items():
        if torch.is_tensor(y) and y.shape == x.shape and torch.allclose(y, function(x), 0, 2e-6):
            return name
    return None


@dataclass(frozen=True)
class MLPPlan:
    """Names of children; ``up`` None: the stacked product of a gated one."""

    up: str | None
    down: str | None
    activation: str


def gated_inner(module: Stranger, x: Tensor, **norm: Any) -> Tensor:
    """What goes into the last product of a gated MLP."""
    plan = plan_of(module)
    up = fused_of(module) if plan.up is None else module._modules[plan.up]
    if isinstance(up, nn.Linear):
        return product(up, x, activation=plan.activation, **norm)
    assert isinstance(up, Product)
    return gated_product(up, x, plan.activation, **norm)


@_of_x_alone
def _gated_forward(self: Stranger, x: Tensor) -> Tensor:
    return product(self._modules[plan_of(self).down], gated_inner(self, x))


@_of_x_alone
def _plain_forward(self: Stranger, x: Tensor) -> Tensor:
    plan = plan_of(self)
    inner = product(self._modules[plan.up], x, activation=plan.activation)
    return inner if plan.down is None else product(self._modules[plan.down], inner)


def mlp(module: Stranger, dtype: torch.dtype) -> Swap | str | None:
    """Products around an activation, by the names that models give them."""
    children: dict[str, Stranger] = module._modules
    names = _GATED + _GATED_STACKED + _PLAIN
    found = next((n for n in names if all(key is None or key in children for key in n)), None)
    given = next((key for key in _ACTIVATION if hasattr(module, key)), None)
    if found is None or given is None:
        return None
    if not all(key is None or is_product(children[key]) for key in found):
        return "its products are not plain linear layers"
    other = weights_beside(module, [key for key in found if key is not None])
    if other is not None:
        return other
    function = getattr(module, given)
    if isinstance(function, nn.Module) and not is_bare(function):
        return f"its activation ({given}) has hooks or a replaced forward"
    activation = kind_of(function)
    gated = found in _GATED or found in _GATED_STACKED
    if activation is None or (gated and activation == "relu"):
        return f"no op has its activation ({given})"
    first = children[found[0]]
    fused = None
    served = tuple(key for key in found if key is not None)
    if found in _GATED:
        fused = stacked([children[key] for key in served[:2]])
        if isinstance(fused, str):
            return fused
        swap = Swap(
            f"mlp ({activation}_mul)",
            _gated_forward,
            MLPPlan(None, found[2], f"{activation}_mul"),
            fused,
            served,
            served[:2],
        )
    elif gated:
        plan = MLPPlan(found[0], found[1], f"{activation}_mul")
        swap = Swap(f"mlp ({activation}_mul)", _gated_forward, plan, serves=served)
        if activation == "gelu_tanh" and isinstance(first, nn.Linear):
            return "no op stacks its gate with that activation"
    else:
        plan = MLPPlan(found[0], found[1], activation)
        swap = Swap(f"linear + {activation}", _plain_forward, plan, serves=served)
    like = next(itertools.chain(first.parameters(), first.buffers()))
    x = probe(like, 2, first.in_features, dtype=dtype_of(first))
    x[1] = large(x[1])
    reason = disagreement(module, swap, x)
    if reason is None and isinstance(fused, Product):
        share(fused, [children[key] for key in served[:2]])
    return reason or swap


# ---- Rows of modules ----------------------------------------------------------------------------


@dataclass(frozen=True)
class RowPlan:
    """Steps in order: indices of one module, or of two that one op computes."""

    steps: tuple[tuple[int, ...], ...]


@_of_x_alone
def _row_forward(self: Stranger, x: Tensor) -> Tensor:
    for step in plan_of(self).steps:
        first = self[step[0]]
        if len(step) == 1:
            x = first(x)
        elif isinstance(first, nn.LayerNorm):
            options = (first.weight, first.bias, first.eps, self[step[1]].approximate)
            x = ops.layernorm_gelu(rows_of(x), *options, weights_ready=True)
        else:
            x = product(first, x, activation=kind_of_module(self[step[1]]))
    return x


def kind_of_module(module: Stranger) -> str | None:
    """As :func:`kind_of`, by class: it is asked in every forward."""
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return {nn.SiLU: "silu", nn.ReLU: "relu"}.get(type(module))


def _is_norm(module: Stranger) -> bool:
    """A layer norm over the last dimension that the op computes, and nothing around it."""
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1:
        return False
    weight: Tensor | None = module.weight
    if weight is None or weight.dtype not in BOUND or not has_rows(weight, module.bias):
        return False
    return is_bare(module)


def row(module: Stranger, dtype: torch.dtype) -> Swap | str | None:
    """An ``nn.Sequential`` in which an activation follows a layer norm or a linear layer."""
    if type(module) is not nn.Sequential:
        return None
    steps: list[tuple[int, ...]] = []
    pairs = []
    for i, child in enumerate(module):
        before: Stranger = module[i - 1] if i and steps[-1] == (i - 1,) else None
        norm_first = _is_norm(before) and type(child) is nn.GELU
        follows = kind_of_module(child) is not None and is_bare(child)
        if follows and (norm_first or is_product(before)):
            steps[-1] = (i - 1, i)
            pairs.append("layernorm_gelu" if norm_first else f"linear + {kind_of_module(child)}")
        else:
            steps.append((i,))
    served = tuple(str(i) for step in steps for i in step if len(step) > 1)
    plan = RowPlan(tuple(steps))
    return Swap(", ".join(pairs), _row_forward, plan, serves=served) if pairs else None
