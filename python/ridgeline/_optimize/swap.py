"""A module's forward replaced on the instance: the tree, names, parameters and hooks stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ridgeline.nn.linear import Product

Stranger: TypeAlias = Any  # a module of which only the attributes that were looked for are known

_FUSED = "ridgeline_fused"
# Another order of roundings, in weights of any size; what is not the same differs by half or more.
BOUND = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Swap:
    """What stands for a module's forward.

    Attributes:
        what: for the list of swaps.
        forward: called with the module and its arguments.
        plan: what ``forward`` knows of the module; read from ``module.ridgeline_swap``.
        fused: stacked weights, of which the module's own are views.
        serves: children whose forwards are no longer called.
        stacks: those whose weights ``fused`` has, in order.
    """

    what: str
    forward: Callable[..., Any]
    plan: Any = None
    fused: Product | None = None
    serves: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()

    def apply(self, module: Stranger) -> None:
        module.__dict__["ridgeline_swap"] = self
        module.__dict__["forward"] = partial(self.forward, module)  # which can be pickled
        if self.fused is not None:
            module.add_module(_FUSED, self.fused)

    @staticmethod
    def undo(module: Stranger) -> None:
        del module.__dict__["forward"]
        del module.__dict__["ridgeline_swap"]
        if module._modules.pop(_FUSED, None) is not None:
            for child in module.children():
                _own_storage(child)


def is_bare(module: Stranger) -> bool:
    """Whether a call of it does what its class's forward, or the swap for that, does."""
    own = module.__dict__
    hooks = module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook")
    return not hooks and ("forward" not in own or "ridgeline_swap" in own)


def plan_of(module: Stranger) -> Any:
    return module.__dict__["ridgeline_swap"].plan


def fused_of(module: Stranger) -> Product:
    fused = module._modules[_FUSED]
    assert isinstance(fused, Product)
    return fused


def _own_storage(child: Stranger) -> None:
    for tensor in (*child.parameters(recurse=False), *child.buffers(recurse=False)):
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor.data = tensor.data.clone()


def probe(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Normal values on the device of ``like``; the global generators stay as they are."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator, device="cpu")
    return values.to(like.device, dtype or like.dtype)


def large(x: Tensor) -> Tensor:
    """Inputs that some forwards clamp; their products stay below float16's 65504."""
    return x * (8 if x.dtype == torch.float16 else 30)


def weights_beside(module: Stranger, known: Collection[str]) -> str | None:
    """Why a module is no more than its known children and parameters, as far as weights go.

    A trial does not see those that change nothing yet: a scale of one, an adapter of zeros.
    """
    tensors = itertools.chain(module.named_parameters(), module.named_buffers(recurse=False))
    other = next((name for name, _ in tensors if name.split(".")[0] not in known), None)
    return None if other is None else f"it has {other} too"


def disagreement(module: Stranger, swap: Swap, *args: Any, **kwargs: Any) -> str | None:
    """Runs both forwards on the same input; why the swap is not the module, or None.

    The swap is applied while it runs. Rows are compared one by one: they may differ in size.
    """
    with torch.no_grad():
        try:
            want = module(*args, **kwargs)
        except Exception as error:  # whatever a stranger's forward raises
            return f"it could not be tried: {type(error).__name__}: {error}".split("\n")[0]
        swap.apply(module)
        try:
            got = module(*args, **kwargs)
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            return f"the ops cannot do it: {error}".split("\n")[0]
        finally:
            del module.__dict__["forward"], module.__dict__["ridgeline_swap"]
            module._modules.pop(_FUSED, None)
    dynamic = any(getattr(part, "dynamic", False) is True for part in module.modules())
    return _difference(want, got, 0.2 if dynamic else 0.0)  # roundings move the codes of inputs


def _difference(want: Any, got: Any, least_bound: float) -> str | None:
    if type(want) is not type(got):
        return f"its forward returns {type(want).__name__}"
    if isinstance(want, tuple):
        return _difference(want[0], got[0], least_bound)
    if want.dtype != got.dtype or want.shape != got.shape:
        return f"its forward returns {want.dtype} {list(want.shape)}"
    if want.dtype not in BOUND:
        return f"no op for {want.dtype}"
    a, b = want.double().flatten(0, -2), got.double().flatten(0, -2)
    error = ((a - b).norm(dim=-1) / a.norm(dim=-1).clamp(min=1e-30)).max().item()
    if not error <= max(BOUND[want.dtype], least_bound):
        return "its forward does something else: a trial gave other values"
    return None
