"""Experts of transformers' models: ``experts_implementation="ridgeline"``.

What a module says of its experts (a gate or none, biases, an activation of its own, a norm behind
them) is what runs on the ops. Those that the ops do not take are computed by transformers' own
``grouped_mm``, and said once in the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations import finegrained_fp8, moe
from transformers.utils import logging

from ridgeline import ops

Experts: TypeAlias = Any  # a module of a class under transformers' use_experts_implementation

_MOST_EXPERTS = 1023
_FLOATS = {
    "cpu": (torch.float32, torch.float16, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16),
}

_HAS_BOTH_INTERFACES = hasattr(finegrained_fp8, "FP8ExpertsInterface")  # from 5.5 on

_logger = logging.get_logger(__name__)


def register(name: str) -> None:
    """Registers experts as ``name``; not with a transformers before 5.5, which refuses the name."""
    if _HAS_BOTH_INTERFACES:
        moe.ExpertsInterface.register(name, experts_forward)
        finegrained_fp8.FP8ExpertsInterface.register(name, fp8_experts_forward)


def experts_of(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Names and modules that run their experts as their config's implementation says; none with a
    transformers before 5.5."""
    for name, module in model.named_modules():
        says = hasattr(module, "is_transposed") and hasattr(module, "has_gate")
        if says and _HAS_BOTH_INTERFACES:
            yield name, module


def reason_against(module: Experts) -> str | None:
    """Why the ops do not run these experts, however they lie; None where they do."""
    up, down = _weights(module)
    floats = _FLOATS.get(up.device.type, ())
    if up.dtype not in floats or down.dtype != up.dtype:
        return f"weights of {up.dtype} and {down.dtype} on {up.device.type}"
    if up.device.type == "cuda" and (up.shape[-1] % 8 or down.shape[-1] % 8):
        return f"sizes {up.shape[-1]} and {down.shape[-1]}, not multiples of 8"
    if module.num_experts > _MOST_EXPERTS:
        return f"{module.num_experts} experts, more than {_MOST_EXPERTS}"
    return None


def is_laid_out(module: Experts) -> bool:
    """Whether columns of a weight lie side by side, as the products read them."""
    return all(weight.stride(-1) == 1 for weight in _weights(module))


def lay_out(module: Experts) -> None:
    """Puts weights of ``[experts, in, out]`` into the order in memory that the products read, in
    place: their shape and values stay."""
    for weight in _parameters(module) if module.is_transposed else ():
        weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)


def lay_back(module: Experts) -> None:
    """Undoes :func:`lay_out`."""
    for weight in _parameters(module) if module.is_transposed else ():
        weight.data = weight.data.contiguous()


def experts_forward(
    module: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The sum of what its experts make of each token, as an ``ExpertsInterface`` of transformers.

    Products in the dtype of the weights, the sum over a token's experts in float32.

    Args:
        module: ``gate_up_proj`` ``[experts, 2 * inner, hidden]`` (``up_proj`` of ``inner`` rows
            without a gate), ``down_proj`` ``[experts, hidden, inner]``, and what is to be done. If
            it ``is_transposed``, of each matrix the transpose, as :func:`lay_out` leaves it.
        hidden_states: ``[tokens, hidden]``.
        top_k_index: int64 or int32 ``[tokens, per_token]``; ``num_experts`` and more are experts
            of other ranks, which add nothing.
        top_k_weights: ``[tokens, per_token]``, 0 for experts of other ranks.

    Returns:
        ``[tokens, hidden]``, dtype of ``hidden_states``.
    """
    reason = reason_against(module)
    if reason is None and not is_laid_out(module):
        reason = "weights of [experts, in, out], which ridgeline.optimize_ lays out"
    if reason is not None:
        _say(module, reason)
        return moe.grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    up, down = _weights(module)
    up_bias, down_bias = _biases(module)
    offsets, rows, places = ops.order_experts(top_k_index, module.num_experts)
    x = hidden_states.to(up.dtype)
    if _gates_by_silu(module):
        hidden = ops.grouped_linear(x, up, offsets, rows=rows, bias=up_bias, activation="silu_mul")
    else:
        hidden = ops.grouped_linear(x, up, offsets, rows=rows, bias=up_bias)
        hidden = _activated(module, hidden)
    out = ops.grouped_linear(hidden, down, offsets, bias=down_bias)
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    weights = top_k_weights.to(torch.float32).contiguous()
    return ops.combine_experts(out, places, weights).to(hidden_states.dtype)


def fp8_experts_forward(
    module: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Experts of transformers' own fp8 format, by its own ``grouped_mm``."""
    _say(module, "weights of float8, which transformers scales itself")
    forward = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS["grouped_mm"]
    return forward(module, hidden_states, top_k_index, top_k_weights)


def _parameters(module: Experts) -> tuple[nn.Parameter, nn.Parameter]:
    return module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj


def _weights(module: Experts) -> tuple[Tensor, Tensor]:
    """Of ``[experts, out, in]``."""
    up, down = _parameters(module)
    return (up.transpose(1, 2), down.transpose(1, 2)) if module.is_transposed else (up, down)


def _biases(module: Experts) -> tuple[Tensor | None, Tensor | None]:
    if not module.has_bias:
        return None, None
    up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
    return up_bias, module.down_proj_bias


def _gates_by_silu(module: Experts) -> bool:
    """Gates side by side before the ups, and nothing but SiLU made of them."""
    if not module.has_gate or type(module)._apply_gate is not moe._default_apply_gate:
        return False
    return isinstance(module.act_fn, (nn.SiLU, SiLUActivation))


def _activated(module: Experts, hidden: Tensor) -> Tensor:
    if not module.has_gate:
        return module.act_fn(hidden)
    if not type(module)._apply_gate.__module__.startswith("transformers.models.gpt_oss."):
        return module._apply_gate(hidden)
    # Its columns are gates and ups by turns: two kernels, where its own are seven.
    halves = hidden.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return ops.swiglu_clamped(halves, module.limit, module.alpha)


def _say(module: Experts, reason: str) -> None:
    if not torch.compiler.is_compiling():
        _logger.warning_once(f"ridgeline: {type(module).__name__} not on the ops: {reason}")
