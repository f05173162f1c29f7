"""Swapping the modules of a model for the ops, where it is certain that they are the same."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from ridgeline._optimize import decoder, simple
from ridgeline._optimize.stack import restack
from ridgeline._optimize.swap import Stranger, Swap
from ridgeline.nn.linear import Product

# Parts before what is made of them.
_UNDERSTOOD: tuple[Callable[[nn.Module, torch.dtype], Swap | str | None], ...] = (
    simple.norm,
    simple.row,
    simple.mlp,
    decoder.attention,
    decoder.layer,
    simple.linear,
)


@dataclass
class Optimized:
    """What :func:`optimize_` did.

    Attributes:
        swapped: name of each module and what stands for it.
        left: name, class and reason of each module with parameters that was left alone.
    """

    swapped: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str, str]] = field(default_factory=list)
    _modules: list[nn.Module] = field(default_factory=list, repr=False)
    _attention: tuple[Stranger, str] | None = field(default=None, repr=False)
    _experts: tuple[Stranger, str] | None = field(default=None, repr=False)
    _laid_out: list[Stranger] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Gives every module its own forward and its own weights back; twice is once."""
        for module in reversed(self._modules):
            hooks = module._load_state_dict_post_hooks
            for key in [key for key, hook in hooks.items() if hook is restack]:
                del hooks[key]
            Swap.undo(module)
        self._modules.clear()
        if self._attention is not None:
            model, implementation = self._attention
            model.set_attn_implementation(implementation)
            self._attention = None
        if self._experts is not None:
            model, implementation = self._experts
            model.set_experts_implementation(implementation)
            self._experts = None
        if self._laid_out:
            from ridgeline.integrations.transformers_experts import lay_back

            for experts in self._laid_out:
                lay_back(experts)
            self._laid_out.clear()

    def __str__(self) -> str:
        swapped = Counter(what for _, what in self.swapped)
        left = Counter((kind, reason) for _, kind, reason in self.left)
        lines = [f"swapped: {count} x {what}" for what, count in swapped.items()]
        return "\n".join(
            lines + [f"left: {count} x {kind}: {why}" for (kind, why), count in left.items()]
        )


def optimize_(model: nn.Module) -> Optimized:
    """Swaps what it understands of ``model`` for the ops, in place, for inference.

    Norms over the last dimension, linear layers, MLPs (the activation or gate in the product),
    attention with rotary positions (one product for queries, keys and values) and whole decoder
    layers (norms and residuals in the products) of transformers' models; a model of transformers
    also gets ``attn_implementation="ridgeline"`` and, where the ops take all of its experts,
    ``experts_implementation="ridgeline"``. A swap is made where a module has the parts and,
    tried on random inputs, both forwards give the same; nothing is known by its class's name.
    Names, parameters, ``state_dict`` and hooks stay as they are; stacked weights are shared with
    the modules they come from. Quantise, load and move the model before.

    Returns:
        The list of swaps and of what was left, and why; its ``undo()`` takes them back.

    Raises:
        TypeError: no module. ValueError: the model is optimised already.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {model!r}")
    if any("ridgeline_swap" in module.__dict__ for module in model.modules()):
        raise ValueError("model: expected one not optimised yet: undo() the last time first")
    done = Optimized()
    dtype = _dtype_of(model)
    modules = dict(model.named_modules())
    reasons: dict[str, str] = {}
    if not model.training and _is_of_transformers(model):
        _take_attention(model, done)
        _take_experts(model, done, reasons)
    for understand in _UNDERSTOOD:
        for name, module in modules.items():
            if "ridgeline_swap" in module.__dict__ or _is_served(name, modules):
                continue
            answer = _reason_to_leave(module) or understand(module, dtype)
            if isinstance(answer, Swap):
                answer.apply(module)
                if answer.stacks:
                    module.register_load_state_dict_post_hook(restack)
                done._modules.append(module)
                done.swapped.append((name, answer.what))
                reasons.pop(name, None)
            elif answer is not None:
                reasons[name] = answer
    served = {name for name, _ in done.swapped if name}
    for name, module in modules.items():
        bare = next(module.parameters(recurse=False), None) is not None
        if name in served or isinstance(module, Product):
            continue
        if name in reasons or (bare and not _is_served(name, modules)):
            kind = type(module).__name__
            done.left.append((name, kind, reasons.get(name, "no op stands for it")))
    return done


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Of the activations: that of the first matrix."""
    floating = (p.dtype for p in model.parameters() if p.dim() > 1 and p.is_floating_point())
    return next(floating, torch.get_default_dtype())


def _reason_to_leave(module: nn.Module) -> str | None:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if hasattr(module, "_hf_hook") or "forward" in module.__dict__:
        return "its forward is replaced already"
    if any(t.device.type not in ("cpu", "cuda") for t in tensors):
        return "its weights are on another kind of device"
    return None


def _is_served(name: str, modules: dict[str, nn.Module]) -> bool:
    """What it computes is part of the swap above it."""
    above, _, own = name.rpartition(".")
    swap = modules[above].__dict__.get("ridgeline_swap")
    return bool(own) and swap is not None and own in swap.serves


def _is_of_transformers(model: nn.Module) -> bool:
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _take_attention(model: Stranger, done: Optimized) -> None:
    """Gives a model of transformers our attention function."""
    from ridgeline.integrations import transformers as integration

    before = model.config._attn_implementation
    if before == integration.NAME:
        return
    integration.enable()
    model.set_attn_implementation(integration.NAME)
    if model.config._attn_implementation == integration.NAME:
        done._attention = model, before
        done.swapped.append(("", f"attention function ({before})"))
    else:
        done.left.append(("", type(model).__name__, "its attention function cannot be set"))


def _take_experts(model: Stranger, done: Optimized, reasons: dict[str, str]) -> None:
    """Gives a model of transformers our experts function. It has one for all of its experts: one
    that the ops do not take leaves all."""
    from ridgeline.integrations import transformers as integration
    from ridgeline.integrations.transformers_experts import (
        experts_of,
        is_laid_out,
        lay_out,
        reason_against,
    )

    experts: dict[str, Stranger] = dict(experts_of(model))
    if not experts:
        return
    config = next(iter(experts.values())).config
    before = config._experts_implementation
    reason = next(filter(None, map(reason_against, experts.values())), None)
    if reason is None and before != integration.NAME:
        model.set_experts_implementation(integration.NAME)
        if config._experts_implementation == integration.NAME:
            done._experts = model, before
        else:
            reason = "its experts function cannot be set"
    if reason is None:
        done.swapped += [(name, f"experts function ({before})") for name in experts]
        done._laid_out = [module for module in experts.values() if not is_laid_out(module)]
        for module in done._laid_out:
            lay_out(module)
    else:
        reasons |= dict.fromkeys(experts, reason)
