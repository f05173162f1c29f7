"""No op has a derivative: what asks for one gets an error, never a gradient or tangent left out.

PyTorch only warns there and goes on without the gradient, or with a tangent of zeros. The check is
one attribute of the result and, for tangents, whether anyone is inside ``forward_ad.dual_level``,
so that inference pays nothing; where gradients are recorded, the result passes through an op whose
backward raises when it runs, in eager mode and in a compiled graph. These two ops have a namespace
of their own: those of "ridgeline" have kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def inference_only(out: Tensor, name: str, *inputs: Tensor | None) -> Tensor:
    """``out`` of the op ``name``, made of ``inputs``; one whose gradient is an error."""
    _refuse_tangents(name, inputs)
    # While a graph is traced the result does not know it yet.
    tracing = torch.compiler.is_compiling() and torch.is_grad_enabled()
    if not (out.requires_grad or tracing):
        return out
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    if not tracing and any(map(torch._C._functorch.is_gradtrackingtensor, wanted)):
        raise NotImplementedError(_message(name))  # PyTorch would speak of this file's own ops
    return torch.ops.ridgeline_python.without_gradient(out, wanted, name) if wanted else out


def refuse_in_place(name: str, *inputs: Tensor | None) -> None:
    """Refuses tensors with derivatives where an op changes its inputs in place.

    Raises:
        NotImplementedError: says how to call the op instead.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise NotImplementedError(_message(name))
    _refuse_tangents(name, inputs)


def changed_in_place(*tensors: Tensor | None) -> None:
    """Tells autograd of a change in place, which a kernel does not: a backward that kept one of
    these is an error then, not a wrong gradient. A compiler knows it from the schema."""
    if torch.compiler.is_compiling():
        return
    counted = [x for x in tensors if x is not None and not x.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)


def _refuse_tangents(name: str, inputs: Sequence[Tensor | None]) -> None:
    if forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise NotImplementedError(
            f"ridgeline.ops.{name} has no forward-mode derivative: call it on tensors without "
            "tangents, or use PyTorch's own operations where derivatives are needed"
        )


def _message(name: str) -> str:
    return (
        f"ridgeline.ops.{name} has no backward: call it under torch.inference_mode() or "
        "torch.no_grad(), or use PyTorch's own operations where gradients are needed"
    )


@torch.library.custom_op("ridgeline_python::without_gradient", mutates_args=())
def _without_gradient(out: Tensor, inputs: Sequence[Tensor], name: str) -> Tensor:
    return out.clone()


@_without_gradient.register_fake
def _(out: Tensor, inputs: Sequence[Tensor], name: str) -> Tensor:
    return torch.empty_like(out)


@torch.library.custom_op("ridgeline_python::refuse_gradient", mutates_args=())
def _refuse_gradient(wanted: Tensor, gradient: Tensor, name: str) -> Tensor:
    raise NotImplementedError(_message(name))


@_refuse_gradient.register_fake
def _(wanted: Tensor, gradient: Tensor, name: str) -> Tensor:
    return torch.empty_like(wanted)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1])
    ctx.name = inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> tuple[None, list[Tensor], None]:
    refuse = (
        torch.ops.ridgeline_python.refuse_gradient
    )  # its results are used, or a compiler drops it
    return None, [refuse(wanted, gradient, ctx.name) for wanted in ctx.saved_tensors], None


_without_gradient.register_autograd(_backward, setup_context=_keep_inputs)
