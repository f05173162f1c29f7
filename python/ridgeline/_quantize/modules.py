"""Quantising the linear layers of any module tree in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from inspect import getsource
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline._quantize.smooth import Observed
from ridgeline.models.linear import int4_group, meets_fp8
from ridgeline.nn.kinds import stacked_experts
from ridgeline.nn.linear import (
    Linear,
    Linear4bit,
    LinearFP8,
    LinearInt8,
    LinearW4A8,
    Product,
)

Maker = Callable[..., Product]


def _w4a8(linear: nn.Linear, group_size: int = 128) -> Linear4bit:
    """As the engine: where the group does not divide the columns it is the largest of 128, 64 and
    32 that does, and inputs that would not be multiplied in 8 bits are not rounded."""
    columns = linear.weight.shape[1]
    group = group_size if columns % group_size == 0 else int4_group(columns)
    meets = meets_fp8(columns if group == -1 else group, columns)
    return (LinearW4A8 if meets else Linear4bit).from_torch(linear, group)


def _choice(made: Product, group_size: int = 128) -> str | None:
    """What :func:`_w4a8` made where the group was not as asked."""
    assert isinstance(made, Linear4bit)
    if group_size in (-1, made.group_size):
        return None
    return f"groups of {made.group_size}{'' if made.dynamic else ', inputs not rounded'}"


_MAKERS: dict[str, Maker] = {
    "int4": Linear4bit.from_torch,
    "w4a8": _w4a8,
    "fp8": LinearFP8.from_torch,
    "int8": LinearInt8.from_torch,
}
_OPTIONS = {
    "int4": ("group_size", "zero_point"),
    "w4a8": ("group_size",),
    "fp8": ("dynamic",),
    "int8": ("seen", "threshold"),
}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_STEP = r"\.\w+|\[[^\[\]]*\]"
_WEIGHT_OF_SELF = rf"\bself((?:{_STEP})+)\.weight\b"


@dataclass(frozen=True)
class Quantized:
    """What :func:`quantize_` did.

    Attributes:
        layers: names of the layers quantised.
        left: name and reason of every other linear layer, and of experts that are stacked.
        bytes_before, bytes_after: of the weights of ``layers``.
        chosen: of "w4a8", name and choice for each of ``layers`` that its group does not divide.
    """

    layers: tuple[str, ...]
    left: tuple[tuple[str, str], ...]
    bytes_before: int
    bytes_after: int
    chosen: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        megabytes = f"{self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB"
        lines = [f"{len(self.layers)} linear layers quantised, {megabytes}"]
        lines += [f"chosen: {name}: {choice}" for name, choice in self.chosen]
        return "\n".join(lines + [f"left: {name}: {reason}" for name, reason in self.left])


def quantize_(
    module: nn.Module,
    format: str,
    *,
    skip: str | Sequence[str] = ("lm_head",),
    **options: Any,
) -> Quantized:
    """Replaces every ``nn.Linear`` below ``module`` by a quantised one, layer by layer.

    Args:
        module: any tree; itself not a linear layer.
        format: "int4" (``group_size=128``, ``zero_point=False``: see
            :func:`ridgeline.ops.pack_int4`), "w4a8" (int4 weights without zero points, inputs in
            fp8 with a scale a row; ``group_size=128``: a multiple of 128 or -1), "fp8"
            (``dynamic=False``: with it the inputs are quantised too) or "int8" (the inputs always
            are; ``seen``, of :func:`ridgeline.observe`, and ``threshold=6.0`` leave the columns of
            outliers in the layer's dtype). Layers of "w4a8" whose columns the group does not divide
            have groups of 128, 64 or 32; with less than 128, unless one group has all columns,
            inputs are not rounded.
        skip: a name or pattern (``*.gate``) of layers to leave, or several: the whole name or its
            end.
        options: of the format.

    Returns:
        What was quantised, what was chosen for layers that differ, what was left and why.

    Raises:
        ValueError: a format that no op serves; a group size that "w4a8" does not have; a module
            changed by :func:`ridgeline.optimize_`, which has to come after.
        TypeError: no module; an option that the format does not have.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected an nn.Module, got {module!r}")
    seen: Observed | None = options.pop("seen", None)
    _check_options(format, seen, options)
    if any("ridgeline_swap" in child.__dict__ for child in module.modules()):
        raise ValueError("module: expected one not optimised yet: undo(), quantise, then optimise")
    if isinstance(module, (nn.Linear, Linear)):
        raise ValueError("module: expected a tree with linear layers in it, got a linear layer")
    skip = names_of(skip)
    layers, left, chosen, before, after = [], [], [], 0, 0
    names: dict[nn.Linear | Linear, list[str]] = {}  # one layer may have several
    for name, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, (nn.Linear, Linear)):
            names.setdefault(child, []).append(name)
    for child, aliases in names.items():
        name = aliases[0]
        reasons = (_reason_to_leave(module, alias, child, skip) for alias in aliases)
        reason = next(filter(None, reasons), None)
        if reason is None and seen is not None and name not in seen.largest:
            reason = "it was not run while its inputs were observed"
        made = None
        if reason is None:
            try:
                own = {} if seen is None else {"largest": seen.largest[name]}
                made = _MAKERS[format](child, **options, **own)
            except ValueError as error:  # what the format cannot do with this shape
                reason = str(error)
        if made is None:
            left.append((name, reason or ""))
            continue
        made.train(child.training)
        for alias in aliases:
            parent, _, attribute = alias.rpartition(".")
            setattr(module.get_submodule(parent), attribute, made)
        layers.append(name)
        choice = _choice(made, **options) if format == "w4a8" else None
        if choice is not None:
            chosen.append((name, choice))
        before += child.weight.nbytes
        after += sum(t.nbytes for key, t in made.named_buffers() if key != "bias")
    left += [(name, "stacked experts are no linear layers") for name, *_ in stacked_experts(module)]
    return Quantized(tuple(layers), tuple(left), before, after, tuple(chosen))


def _check_options(format: str, seen: Observed | None, options: dict[str, Any]) -> None:
    """Raises for a format or an option that there is not, before any layer is replaced."""
    if not isinstance(format, str) or format not in _MAKERS:
        known = ", ".join(map(repr, _MAKERS))
        raise ValueError(f"format: expected {known}, got {format!r} (no op serves it)")
    if seen is not None and not isinstance(seen, Observed):
        raise TypeError(f"seen: expected what ridgeline.observe gave, got {seen!r}")
    if seen is not None and format != "int8":
        raise ValueError(f'seen: expected with format "int8" only, got it with {format!r}')
    for name in options:
        if name not in _OPTIONS[format]:
            has = ", ".join(_OPTIONS[format])
            raise TypeError(f"{name}: not an option of {format!r}, which has {has}")
    if seen is None and "threshold" in options:
        raise ValueError("threshold: expected with seen, the magnitudes that it is held against")
    group = options.get("group_size", 128)
    if format == "w4a8" and (isinstance(group, bool) or not isinstance(group, int)):
        raise TypeError(f"group_size: expected an integer, got {group!r}")
    if format == "w4a8" and group != -1 and (group < 128 or group % 128):
        raise ValueError(
            f"group_size: expected -1 or a multiple of 128 for inputs in fp8, got {group}"
        )


def names_of(skip: str | Sequence[str]) -> tuple[str, ...]:
    """One name is not a list of its letters."""
    names = (skip,) if isinstance(skip, str) else skip
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"skip: expected a name or a list of names, got {skip!r}")
    return tuple(names)


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Whether the whole name, or its end after a dot, fits one of the patterns."""
    return any(fnmatch(name, p) or fnmatch(name, f"*.{p}") for p in patterns)


def _reason_to_leave(
    module: nn.Module, name: str, child: nn.Module, skip: Sequence[str]
) -> str | None:
    if is_named(name, skip):
        return "named in skip"
    if type(child) not in (nn.Linear, Linear):
        return f"a {type(child).__name__} may do more than a linear layer"
    weight = child.weight
    if type(weight) not in (Tensor, nn.Parameter):  # its values may be elsewhere, or a part
        return f"its weight is a {type(weight).__name__}"
    if weight.device.type not in ("cpu", "cuda") or weight.dtype not in _FLOATS:
        return f"its weight is {weight.dtype} on {weight.device}"
    if child._forward_hooks or child._forward_pre_hooks or hasattr(child, "_hf_hook"):
        return "it has hooks"
    if "forward" in child.__dict__:
        return "its forward is replaced"
    return _read_beside(module, name)


def _read_beside(module: nn.Module, name: str) -> str | None:
    """Whether a module above a layer reads its weight itself. Weights of other formats are no
    tensors of the layer's dtype, which a fast path would multiply or inputs be cast to."""
    path, calls = name.split("."), module
    for depth, part in enumerate(path):
        kind: Any = type(module)
        below = path[depth:]
        for read in _weights_read_by(kind):
            if len(read) == len(below) and all(r in ("[]", p) for r, p in zip(read, below)):
                return f"its weight is read by the {kind.__name__}"
        calls = calls if isinstance(module, (nn.ModuleList, nn.ModuleDict)) else module
        module = module.get_submodule(part)
    kind = type(calls)
    return f"its weight may be read by the {kind.__name__}" if _reads_any(kind) else None


@cache
def _reads_any(kind: type) -> bool:
    """Whether a forward reads the weight of what it calls otherwise than ``self.x``."""
    roots = re.findall(
        rf"\b(\w+)(?:{_STEP})*\.weight\b", _source_of(getattr(kind, "forward", None))
    )
    return set(roots) - {"self"} != set()


@cache
def _weights_read_by(kind: type) -> frozenset[tuple[str, ...]]:
    """The ``x[i].y`` of every ``self.x[i].y.weight`` in the code of a class and of those that it
    inherits from, as ``("x", "[]", "y")``: any index is "[]"."""
    own = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    found = re.findall(_WEIGHT_OF_SELF, "\n".join(map(_source_of, own)))
    return frozenset(
        tuple("[]" if step[0] == "[" else step[1:] for step in re.findall(_STEP, path))
        for path in found
    )


def _source_of(kind: Any) -> str:
    """The code of a class or function; empty if it is not there."""
    try:
        return getsource(kind)
    except (OSError, TypeError):
        return ""
