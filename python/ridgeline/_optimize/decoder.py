"""Attention and layers of decoders in the manner of Llama, as transformers writes them."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline._optimize.simple import NormPlan, gated_inner
from ridgeline._optimize.stack import dtype_of, is_product, product, share, stacked
from ridgeline._optimize.swap import (
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
from ridgeline.nn.rows import rows_of

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# What a module gives to its attention function, where it has it under another name.
_PASSED = {
    "sliding_window": "sliding_window",
    "s_aux": "sinks",
    "softcap": "attn_logit_softcapping",
}
_CACHES = ("cache", "past_key_values")  # names of the cache: from transformers 5.24 on, and before
# What a forward may be given: anything else would change what it does.
_ARGUMENTS = {
    *("self", "hidden_states", "position_embeddings", "attention_mask", "position_ids"),
    *("cache_position", "use_cache", "output_attentions", *_CACHES),
}


@dataclass(frozen=True)
class AttentionPlan:
    """``functions``: transformers' attention functions. ``norms``: of the heads of queries and
    keys; None: there are none. What a step would look up in modules is here: that costs the host
    as much as a launch. ``cache``: its name among the forward's arguments; None: it has none."""

    functions: Any
    known: dict[str, Any]
    config: Any
    output: Stranger
    cache: str | None
    layer_idx: int
    scaling: float
    heads: int
    kv_heads: int
    norms: tuple[NormPlan, NormPlan] | None
    passed: tuple[tuple[str, str], ...]


def unknown_argument(module: Stranger) -> str | None:
    """Why a forward cannot be replaced that may be told more than is known here, or None."""
    for name, parameter in _arguments(module).items():
        if name not in _ARGUMENTS and parameter.kind is not parameter.VAR_KEYWORD:
            return f"its forward takes {name}, which is not known"
    return None


def cache_name(module: Stranger) -> str | None:
    return next((name for name in _CACHES if name in _arguments(module)), None)


def _arguments(module: Stranger) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(module).forward).parameters


def take_cache(name: str | None, past: Any, kwargs: dict[str, Any]) -> Any:
    """The cache out of ``kwargs``, by its name or by the old one; else ``past``."""
    past = kwargs.pop("past_key_values", past)
    return past if name is None else kwargs.pop(name, past)


def rotation(cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """The table and positions of ``ops.rope`` for cosines and sines of each token."""
    compiling = torch.compiler.is_compiling()
    kept = None if compiling else cos.__dict__.get("ridgeline_rotation")
    if kept is None:  # once a step: the layers share cos
        half = cos.shape[-1] // 2
        table = torch.cat((cos[..., :half], sin[..., :half]), -1).flatten(0, -2)
        rows = torch.arange(table.shape[0], dtype=torch.int32, device=cos.device)
        kept = table, rows.repeat(batch) if cos.shape[0] < batch else rows
        if not compiling:
            cos.__dict__["ridgeline_rotation"] = kept
    return kept


def attend(
    module: Stranger,
    x: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    cache: Any,
    norm: dict[str, Any],
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Everything but the last product: ``[B, S, heads * D]`` and the weights, if there are any."""
    plan, (batch, length, _) = plan_of(module), x.shape
    heads, kv_heads = plan.heads, plan.kv_heads
    qkv = fused_of(module).product(x, **norm).view(batch * length, heads + 2 * kv_heads, -1)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    if plan.norms is not None:
        # A norm takes rows at one stride, which q and k alone are not: all heads, then a part.
        q, k = (
            ops.rmsnorm(qkv, part.weight, p.eps, offset=p.offset, weights_ready=True)[:, rows]
            for part, p, rows in (
                (module.q_norm, plan.norms[0], slice(heads)),
                (module.k_norm, plan.norms[1], slice(heads, heads + kv_heads)),
            )
        )
    table, positions = rotation(*position_embeddings, batch)
    if torch.is_grad_enabled():  # a backward is refused at the products already
        q, k, v = q.detach(), k.detach(), v.detach()
    ops.rope(q, k, positions, table)
    query, key, value = (t.view(batch, length, t.shape[1], -1).transpose(1, 2) for t in (q, k, v))
    if cache is not None:
        # A cache in pages tells the attention function more by them.
        told = {"kwargs": kwargs} if plan.cache == "cache" else {}
        key, value = cache.update(key, value, plan.layer_idx, **told)
    kwargs |= {name: getattr(module, own) for name, own in plan.passed}
    dropout = module.attention_dropout if module.training else 0.0
    out, weights = _function(module, plan)(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=plan.scaling,
        **kwargs,
    )
    return out.reshape(batch, length, -1), weights


def _function(module: Stranger, plan: AttentionPlan) -> Any:
    """The attention function that the configuration names now."""
    name = plan.config._attn_implementation
    if name not in plan.known:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        plan.known[name] = plan.functions.get_interface(name, eager)
    return plan.known[name]


def _attention_forward(
    self: Stranger,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    norm: dict[str, Any] = {}
    plan = plan_of(self)
    past = take_cache(plan.cache, past, kwargs)
    args = (hidden_states, position_embeddings, attention_mask, past, norm)
    out, weights = attend(self, *args, **kwargs)
    return product(plan.output, out), weights


def attention(module: Stranger, dtype: torch.dtype) -> Swap | str | None:
    """Three projections, norms of heads or none, a rotation by halves, the attention function."""
    children: dict[str, Stranger] = module._modules
    if not {*_PROJECTIONS, "o_proj"} <= set(children):
        return None
    if "transformers" not in sys.modules:
        return "not a model of transformers"
    known = ("config", "head_dim", "scaling", "layer_idx", "attention_dropout")
    if not all(hasattr(module, key) for key in known):
        return "not an attention module as transformers writes them"
    if unknown := unknown_argument(module):
        return unknown
    parts = [children[key] for key in _PROJECTIONS]
    if not all(map(is_product, [*parts, children["o_proj"]])):
        return "its projections are not plain linear layers"
    norms = tuple(children.get(key) for key in ("q_norm", "k_norm"))
    swaps = tuple(n.__dict__.get("ridgeline_swap") for n in norms if n is not None)
    bare = all(norm is None or is_bare(norm) for norm in norms)
    if len(swaps) == 1 or not bare or any(s is None or s.what != "rmsnorm" for s in swaps):
        return "the norms of its heads are not swapped"
    other = weights_beside(module, {*_PROJECTIONS, "o_proj", "q_norm", "k_norm", *_PASSED.values()})
    if other is not None:
        return other
    fused = stacked(parts)
    if isinstance(fused, str):
        return fused
    dim = module.head_dim
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plan = AttentionPlan(
        ALL_ATTENTION_FUNCTIONS,
        {},
        module.config,
        children["o_proj"],
        cache_name(module),
        module.layer_idx,
        module.scaling,
        parts[0].out_features // dim,
        parts[1].out_features // dim,
        (swaps[0].plan, swaps[1].plan) if swaps else None,
        tuple((name, own) for name, own in _PASSED.items() if hasattr(module, own)),
    )
    served = (*_PROJECTIONS, "o_proj")
    what = "attention (qkv, rope)"
    swap = Swap(what, _attention_forward, plan, fused, served, _PROJECTIONS)
    inputs = attention_inputs(module)
    cos, sin = inputs["position_embeddings"]
    one: dict[str, Any] = {"position_embeddings": (cos[:, :1], sin[:, :1])}
    one["hidden_states"] = large(inputs["hidden_states"][:, :1])  # which no softmax weighs
    reason = disagreement(module, swap, **inputs) or disagreement(module, swap, **inputs | one)
    if reason is None:
        share(fused, parts)
    return reason or swap


def attention_inputs(module: Stranger) -> dict[str, Any]:
    """A trial of three tokens in each of two rows."""
    first = module._modules["q_proj"]
    like = next(itertools.chain(first.parameters(), first.buffers()))
    dtype = dtype_of(first)
    parameters = getattr(module.config, "rope_parameters", None) or {}
    part = parameters.get("partial_rotary_factor", 1.0) if isinstance(parameters, dict) else 1.0
    angles = probe(like, 2, 3, int(module.head_dim * part) // 2, dtype=torch.float32).repeat(
        1, 1, 2
    )
    x = probe(like, 2, 3, first.in_features, dtype=dtype)
    position_embeddings = angles.cos().to(dtype), angles.sin().to(dtype)
    return {
        "hidden_states": x,
        "position_embeddings": position_embeddings,
        "attention_mask": None,
    }


@dataclass(frozen=True)
class LayerPlan:
    """The parts of a layer, the eps of both norms, and its name for the cache."""

    norms: tuple[Stranger, Stranger]
    eps: tuple[float, float]
    attention: Stranger
    output: Stranger
    mlp: Stranger
    down: Stranger
    cache: str | None


def _decoder_forward(
    self: Stranger,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    plan = plan_of(self)
    past = take_cache(plan.cache, past, kwargs)
    if torch.is_autocast_enabled(hidden_states.device.type):  # residual and products differ
        given = (hidden_states, attention_mask, position_ids, past, use_cache)
        return type(self).forward(self, *given, position_embeddings, **kwargs)
    hidden_states = rows_of(hidden_states)  # a residual too
    assert position_embeddings is not None
    norm = {"norm_weight": plan.norms[0].weight, "norm_eps": plan.eps[0]}
    args = (hidden_states, position_embeddings, attention_mask, past, norm)
    out, _ = attend(plan.attention, *args, **kwargs)
    hidden = product(plan.output, out, residual=hidden_states)
    norm = {"norm_weight": plan.norms[1].weight, "norm_eps": plan.eps[1]}
    return product(plan.down, gated_inner(plan.mlp, hidden, **norm), residual=hidden)


def layer(module: Stranger, dtype: torch.dtype) -> Swap | str | None:
    """Two norms, attention and a gated MLP, all swapped, each added to what it read."""
    names = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
    if not set(names) <= set(module._modules):
        return None
    if set(module._modules) != set(names) or weights_beside(module, names):
        return "it has more than two norms, attention and an MLP"
    if unknown := unknown_argument(module):
        return unknown
    parts = [module._modules[name] for name in names]
    swaps = [part.__dict__.get("ridgeline_swap") for part in parts]
    if not all(map(is_bare, parts)):
        return "its parts have hooks"
    whats = [swap.what if swap else "" for swap in swaps]
    if whats[:2] != ["rmsnorm"] * 2 or not (whats[2] and whats[3].endswith("_mul)")):
        return "not all of its parts are swapped"
    if any(swap.plan.offset for swap in swaps[:2]):
        return "products take no norm whose weight has an offset"
    plan = LayerPlan(
        (parts[0], parts[1]),
        (swaps[0].plan.eps, swaps[1].plan.eps),
        parts[2],
        parts[2]._modules["o_proj"],
        parts[3],
        parts[3]._modules[swaps[3].plan.down],
        cache_name(module),
    )
    swap = Swap("layer (norms and residuals in the products)", _decoder_forward, plan)
    inputs = attention_inputs(module._modules["self_attn"])
    return disagreement(module, swap, **inputs) or swap
