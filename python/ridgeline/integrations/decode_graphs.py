"""Decode steps of a transformers model as CUDA graphs, under its own ``generate()``.

A step of one token over a static cache is one graph: its kernels read lengths and masks on the
device, so the graph of the first step serves all. Everything else (prompts, growing caches, caches
with a window, which count on the host) runs as before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor

from ridgeline.integrations.key_ranges import KeyRanges

_CACHES = ("cache", "past_key_values")  # names of the cache: from transformers 5.24 on, and before


@dataclass
class _Step:
    """A captured step: its inputs, to be overwritten, and what it leaves, without the cache.

    The cache's memory may then serve the next one, whose graph it is if the addresses are the same.
    ``caches``: names that the output has for it.
    """

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Any]
    kind: type
    output: dict[str, Any]
    caches: list[str]


class DecodeGraphs:
    """Replaces the forward of ``model`` until :meth:`undo`.

    Logits are those of the graph and change with the next step: who keeps them copies them, as
    ``generate()`` does. Swap and quantise the model before. One step is kept, of the cache, the
    batch and the kind of mask seen last; the first step of another runs without a graph, the
    second is captured.

    Raises:
        ValueError: the model is not on a CUDA device, or has such graphs already.
    """

    def __init__(self, model: Any) -> None:
        if model.device.type != "cuda":
            raise ValueError(f"model: expected on a CUDA device, got {model.device}")
        if "forward" in model.__dict__:
            raise ValueError("model: its forward is replaced already")
        self._model, self._forward = model, model.forward
        self._seen: Any = None
        self._step: _Step | None = None
        update_wrapper(self, model.forward)  # generate() asks for the names of its arguments
        model.forward = self

    def undo(self) -> None:
        """Gives the model its forward back and frees the graph."""
        self._model.__dict__.pop("forward", None)
        self._seen = self._step = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = None if args or torch.is_grad_enabled() else _key(kwargs)
        if key is None:
            return self._forward(*args, **kwargs)
        if key != self._seen:
            self._seen, self._step = key, None
            return self._forward(**kwargs)
        if self._step is None:
            self._step = self._captured(kwargs)
        _overwrite(self._step.inputs, kwargs)
        self._step.graph.replay()
        cache = dict.fromkeys(self._step.caches, kwargs[_cache_name(kwargs)])
        return self._step.kind(**self._step.output, **cache)

    def _captured(self, kwargs: dict[str, Any]) -> _Step:
        inputs = {name: _copied(value) for name, value in kwargs.items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._forward(**inputs)
        del inputs[_cache_name(inputs)]
        left = {name: value for name, value in output.items() if name not in _CACHES}
        caches = [name for name in output.keys() if name in _CACHES]
        return _Step(graph, inputs, type(output), left, caches)


def _cache_name(kwargs: dict[str, Any]) -> str:
    return next((name for name in _CACHES if name in kwargs), _CACHES[0])


def _key(kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What a graph depends on; None where a step cannot be one."""
    ids: Tensor | None = kwargs.get("input_ids")
    cache: Any = kwargs.get(_cache_name(kwargs))
    if ids is None or ids.dim() != 2 or ids.shape[1] != 1 or not _is_static(cache):
        return None
    if kwargs.get("return_dict") is False or kwargs.get("use_cache") is False:
        return None
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return None
    states = ((x.keys, x.values, x.cumulative_length) for x in cache.layers)
    key: list[Any] = [tensor.data_ptr() for state in states for tensor in state]
    for name, value in kwargs.items():
        if name in _CACHES:
            continue
        parts = value.items() if isinstance(value, dict) else ((name, value),)
        for part, one in parts:
            if isinstance(one, Tensor):
                key.append((name, part, one.shape, one.dtype))
            elif one is None or isinstance(one, (bool, int, str)):
                key.append((name, part, one))
            else:
                return None
    return tuple(key)


def _is_static(cache: Any) -> bool:
    layers = getattr(cache, "layers", None) or ()
    plain = [type(layer).__name__ == "StaticLayer" and layer.is_initialized for layer in layers]
    return bool(plain) and all(plain)


def _compact(value: Tensor) -> Tensor:
    """Key ranges without the dimensions that they are expanded over."""
    is_ranges = value.dim() == 4 and KeyRanges.is_packed(value)
    return value[:, :1, :1] if is_ranges else value


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    return _compact(value).clone().expand(value.shape) if isinstance(value, Tensor) else value


def _overwrite(inputs: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _overwrite(inputs[name], value)
        elif isinstance(value, Tensor):
            _compact(inputs[name]).copy_(_compact(value))
