"""Before weights and activations become int8: what activations reach, and moving it to weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.nn.linear import Linear


@dataclass(frozen=True)
class Observed:
    """What a run of a module showed.

    Attributes:
        largest: by the name of a linear layer, the largest magnitude of each input column.
        fed: by the name of a norm, the names of the linear layers that take its output as it is, if
            none of them took anything else too.
    """

    largest: Mapping[str, Tensor]
    fed: Mapping[str, Sequence[str]]


def observe(module: nn.Module, run: Callable[[], object]) -> Observed:
    """Calls ``run``, which should call ``module`` on inputs as they will come, and watches.

    Args:
        module: any tree; unchanged.
        run: no graph, no ``torch.compile``: hooks must be called.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected an nn.Module, got {module!r}")
    if not callable(run):
        raise TypeError(f"run: expected a function that calls module, got {run!r}")
    largest: dict[str, Tensor] = {}
    fed: dict[str, list[str]] = {}
    outputs: dict[int, tuple[str, Tensor]] = {}  # the tensors are kept, or an id comes again
    sources: dict[str, set[str]] = {}  # of a linear layer: norms, and "" for anything else

    def after_norm(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs[id(output)] = (name, output)

        return hook

    def before_linear(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: Any) -> None:
            x = inputs[0]
            if x.numel() == 0:
                return
            seen = x.detach().abs().reshape(-1, x.shape[-1]).amax(0).float()
            largest[name] = torch.maximum(largest[name], seen) if name in largest else seen
            source, kept = outputs.get(id(x), ("", None))
            sources.setdefault(name, set()).add(source if kept is x else "")

        return hook

    handles = []
    for name, child in module.named_modules():
        if isinstance(child, (nn.Linear, Linear)):
            handles.append(child.register_forward_pre_hook(before_linear(name)))
        elif _is_norm(child):
            handles.append(child.register_forward_hook(after_norm(name)))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    for name, norms in sources.items():
        for norm in norms - {""}:
            fed.setdefault(norm, []).append(name)
    alone = {n: readers for n, readers in fed.items() if all(len(sources[r]) == 1 for r in readers)}
    return Observed(largest, alone)


def _is_norm(child: nn.Module) -> bool:
    weight = getattr(child, "weight", None)
    return "Norm" in type(child).__name__ and isinstance(weight, Tensor) and weight.dim() == 1


@torch.no_grad()
def smooth_(module: nn.Module, seen: Observed, *, alpha: float = 0.5) -> tuple[str, ...]:
    """Divides columns of activations, and multiplies those of the weights they meet.

    Column ``j`` of a norm's output is divided by ``max|x_j|**alpha / max|W_j|**(1 - alpha)`` in the
    norm's weight, and the column of every layer that reads it multiplied: the module computes what
    it did, from activations whose large columns do not take all of int8.

    Args:
        module: changed in place; as :func:`observe` saw it.
        seen: of :func:`observe`.
        alpha: from 0, which leaves the weights' columns equal, to 1, the activations'.

    Returns:
        The names of the norms changed: those whose output is proportional to their weight and
        feeds linear layers alone, none of which shares its weight or reads anything else. What
        else reads a norm's output is not seen: a module that reads it otherwise must be left out
        of ``seen.fed``.

    Raises:
        ValueError: alpha outside [0, 1]; a layer that is not as it was seen, or is quantised.

    Source: Xiao et al., "SmoothQuant", 2023.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected an nn.Module, got {module!r}")
    if not isinstance(seen, Observed):
        raise TypeError(f"seen: expected what ridgeline.observe gave, got {seen!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected a number from 0 to 1, got {alpha}")
    _expect_as_seen(module, seen)
    changed = []
    names = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    for name, readers in seen.fed.items():
        norm = module.get_submodule(name)
        layers = [module.get_submodule(reader) for reader in readers]
        own = [*norm.parameters(recurse=False), *(layer.weight for layer in layers)]
        if any(names[id(p)] > 1 for p in own):  # what else has it would change
            continue
        weights = [layer.weight for layer in layers if isinstance(layer.weight, Tensor)]
        of_weights = torch.stack([w.abs().amax(0).float() for w in weights]).amax(0)
        of_x = seen.largest[readers[0]].to(of_weights.device)
        factors = smoothing_factors(of_x, of_weights, alpha)
        if not _divide(norm, factors):
            continue
        for weight in weights:
            weight.mul_(factors.to(weight.dtype))
        changed.append(name)
    return tuple(changed)


def _expect_as_seen(module: nn.Module, seen: Observed) -> None:
    modules = dict(module.named_modules())
    for name in (reader for readers in seen.fed.values() for reader in readers):
        layer, columns = modules.get(name), seen.largest[name].numel()
        if not isinstance(layer, (nn.Linear, Linear)) or layer.in_features != columns:
            raise ValueError(
                f"module: expected {name!r} as it was seen, a linear layer of {columns} inputs "
                f"that is not quantised, got {layer!r}"
            )


def smoothing_factors(of_x: Tensor, of_weights: Tensor, alpha: float) -> Tensor:
    """What columns of activations are divided by, of the largest magnitudes of each."""
    return of_x.clamp(min=1e-5) ** alpha / of_weights.clamp(min=1e-5) ** (1 - alpha)


def _divide(norm: nn.Module, factors: Tensor) -> bool:
    """Whether the norm's output could be divided: some add one to their weight."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    if weight.numel() != factors.numel() or hasattr(norm, "running_mean"):
        return False
    probe = torch.randn(2, factors.numel(), device=factors.device).to(weight.dtype)
    before = norm(probe).float()
    kept = {key: p.detach().clone() for key, p in norm.named_parameters(recurse=False)}
    for parameter in norm.parameters(recurse=False):  # the weight, and a bias
        parameter.div_(factors.to(parameter.dtype))
    after = norm(probe).float() * factors
    error = (after - before).norm() / before.norm().clamp(min=1e-20)
    if error < (1e-4 if weight.dtype == torch.float32 else 2e-2):
        return True
    for key, parameter in norm.named_parameters(recurse=False):
        parameter.copy_(kept[key])
    return False
