"""Derivatives asked of an op are an error that says what to do; inference never meets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from numerics import as_tuple
from op_table import OpCase, Sample
from ridgeline import ops
from test_ops import CASES, context_for, first_full_sample

NO_TANGENT = r"ridgeline\.ops\.\w+ has no forward-mode derivative: call it on tensors without"
MESSAGE = r"ridgeline\.ops\.\w+ has no backward: call it under torch\.inference_mode"
WITHOUT_GRADIENT = {"sample", "top_logprobs", "copy_blocks", "order_experts", "pack_int4"}
DIFFERENTIABLE = [case for case in CASES if case.name not in WITHOUT_GRADIENT]


def recorded_inputs(case: OpCase) -> dict[str, Any]:
    inputs = first_full_sample(case).make(context_for("cpu", torch.float32))
    for value in inputs.values():
        if isinstance(value, Tensor) and value.dtype == torch.float32:
            value.requires_grad_()
    return inputs


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
def test_a_gradient_is_refused(case: OpCase):
    if torch.float32 not in case.dtypes:
        pytest.skip("no float32 on the CPU")
    with pytest.raises(NotImplementedError, match=MESSAGE):
        outputs = as_tuple(case.op(**recorded_inputs(case)))
        floating = [out for out in outputs if out.is_floating_point()]
        if not floating:
            pytest.skip("its outputs are integers")
        sum(out.float().sum() for out in floating).backward()


def differentiable_inputs(case: OpCase) -> list[tuple[str, Sample]]:
    """Each floating argument, with a sample that has it; codes drawn or packed have none."""
    found: dict[str, Sample] = {}
    for sample in case.samples:
        for name, value in sample.make(context_for("cpu", case.dtypes[0])).items():
            value = getattr(value, "scales", value)
            if isinstance(value, Tensor) and value.is_floating_point():
                found.setdefault(name, sample)
    undefined = ("sample", "pack_int4")
    return [(name, found[name]) for name in found if case.name not in undefined]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_gradient_of_any_one_input_is_refused(case: OpCase):
    """PyTorch alone would leave it out: with a warning, and of what is written in silence."""
    for name, sample in differentiable_inputs(case):
        inputs = sample.make(context_for("cpu", case.dtypes[0]))
        getattr(inputs[name], "scales", inputs[name]).requires_grad_()
        with pytest.raises(NotImplementedError, match=MESSAGE):
            outputs = [o.float().sum() for o in as_tuple(case.op(**inputs))]
            (torch.ones((), requires_grad=True) * sum(outputs)).backward()


def test_a_gradient_of_what_a_residual_takes_is_refused():
    x, residual = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    with pytest.raises(NotImplementedError, match=MESSAGE):
        ops.add_rmsnorm(x, residual, torch.ones(8))


def test_a_gradient_of_logprobs_is_refused():
    logits = torch.randn(2, 8, requires_grad=True)
    logprobs = ops.sample(logits, 1.0, 0, 1.0, 0.0, 1, 1, logprobs=2)[1]
    with pytest.raises(NotImplementedError, match=MESSAGE):
        logprobs.sum().backward()


def test_a_compiled_gradient_is_refused():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    compiled = torch.compile(ops.rmsnorm, fullgraph=True, backend="aot_eager")
    with pytest.raises(NotImplementedError, match=MESSAGE):
        compiled(x, weight).sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_with_parameters_is_as_without(mode: Any):
    x, weight = torch.randn(3, 8), torch.nn.Parameter(torch.ones(8))
    with mode():
        out = ops.rmsnorm(x, weight)
    assert not out.requires_grad and torch.equal(out, ops.rmsnorm(x, weight.detach()))


def test_a_forward_with_recorded_parameters_has_the_same_bits():
    x, weight = torch.randn(3, 8), torch.nn.Parameter(torch.ones(8))
    assert torch.equal(ops.rmsnorm(x, weight), ops.rmsnorm(x, weight.detach()))


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=lambda case: case.name)
def test_a_tangent_is_refused(case: OpCase):
    """PyTorch alone would go on with zeros."""
    if torch.float32 not in case.dtypes:
        pytest.skip("no float32 on the CPU")
    inputs = first_full_sample(case).make(context_for("cpu", torch.float32))
    with forward_ad.dual_level():
        case.op(**inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                inputs[name] = forward_ad.make_dual(value, torch.ones_like(value))
        with pytest.raises(NotImplementedError, match=NO_TANGENT):
            case.op(**inputs)


@pytest.mark.parametrize("transform", [torch.func.jvp, torch.func.jacfwd])
def test_transforms_of_tangents_are_refused(transform: Any):
    x, weight = torch.randn(3, 8), torch.ones(8)

    def norm(x: Tensor) -> Tensor:
        return ops.rmsnorm(x, weight)

    with pytest.raises(NotImplementedError, match=NO_TANGENT):
        transform(norm, (x,), (x,)) if transform is torch.func.jvp else transform(norm)(x)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_transforms_of_gradients_are_refused(transform: Any):
    with pytest.raises(NotImplementedError, match=MESSAGE):
        transform(lambda x: ops.rmsnorm(x, torch.ones(8)).sum())(torch.randn(3, 8))


@pytest.mark.parametrize("case", [c for c in CASES if c.mutates], ids=lambda case: case.name)
def test_a_change_in_place_is_counted(case: OpCase):
    """A backward that kept the tensor finds it changed, and says so."""
    inputs = first_full_sample(case).make(context_for("cpu", case.dtypes[0]))
    changed = [inputs.get(name) for name in (*case.mutates, "k_scale", "v_scale")]
    before = [tensor._version for tensor in changed if tensor is not None]
    case.op(**inputs)
    after = [tensor._version for tensor in changed if tensor is not None]
    assert before and all(old < new for old, new in zip(before, after))


def test_a_change_in_place_is_counted_in_a_tensor_of_inference():
    with torch.inference_mode():
        x, residual = torch.randn(2, 3, 8)
    ops.add_rmsnorm(x, residual, torch.ones(8))  # has no count to raise


def test_a_backward_of_what_an_op_changed_is_an_error():
    residual, weight = torch.randn(3, 8), torch.ones(8, requires_grad=True)
    product = residual * weight
    ops.add_rmsnorm(torch.randn(3, 8), residual, torch.ones(8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_compiled_change_in_place_is_known():
    residual, weight = torch.randn(3, 8), torch.ones(8)
    compiled = torch.compile(ops.add_rmsnorm, fullgraph=True, backend="aot_eager")
    before = residual._version
    compiled(torch.randn(3, 8), residual, weight)
    assert residual._version > before
