"""Gradients asked of an op are an error that says what to do; inference never meets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from numerics import as_tuple
from op_table import OpCase
from ridgeline import ops
from test_ops import CASES, context_for, first_full_sample

MESSAGE = r"ridgeline\.ops\.\w+ has no backward: call it under torch\.inference_mode"
WITHOUT_GRADIENT = {"sample", "top_logprobs", "copy_blocks", "pack_int4"}
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


@pytest.mark.parametrize(
    "name, wanted",
    [
        *(("rope", x) for x in ("q", "k")),
        *(("write_kv", x) for x in ("k", "v")),
        *(("rope_write_kv", x) for x in ("q", "k", "v")),
        *(("rope_paged_attention", x) for x in ("q", "k", "v")),
    ],
)
def test_a_gradient_of_one_input_of_a_writer_is_refused(name: str, wanted: str):
    """The caches would keep what it gave them, and its gradient would be left out in silence."""
    case = next(case for case in CASES if case.name == name)
    inputs = first_full_sample(case).make(context_for("cpu", torch.float32))
    inputs[wanted].requires_grad_()
    with pytest.raises(NotImplementedError, match=MESSAGE):
        case.op(**inputs)


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
