"""What programs wrap around models leaves every op's bits as they are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from op_table import OpCase
from test_ops import CASES, clone, context_for, first_full_sample, outputs_of, same_bits

MODES = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),  # ops take tensors as they are
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_modes(case: OpCase, mode: str):
    inputs = first_full_sample(case).make(context_for("cpu", case.dtypes[0]))
    expected = outputs_of(case, case.op, clone(inputs))
    context: AbstractContextManager[Any] = MODES[mode]()
    with context:
        actual = outputs_of(case, case.op, clone(inputs))
    assert all(map(same_bits, actual, expected))


class Call(nn.Module):
    def __init__(self, case: OpCase, constants: dict[str, Any]) -> None:
        super().__init__()
        self.case, self.constants = case, constants

    def forward(self, tensors: dict[str, Tensor]) -> Any:
        return self.case.op(**tensors, **self.constants)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_export(case: OpCase):
    inputs = first_full_sample(case).make(context_for("cpu", case.dtypes[0]))
    tensors = {k: v for k, v in inputs.items() if isinstance(v, Tensor)}
    module = Call(case, {k: v for k, v in inputs.items() if k not in tensors})
    program = torch.export.export(module, (clone(tensors),))
    actual, expected = clone(tensors), clone(tensors)
    results = [f(t) for f, t in ((program.module(), actual), (module, expected))]
    pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in results if r is not None))
    assert all(same_bits(a, b) for a, b in pairs)
    assert all(same_bits(actual[name], expected[name]) for name in tensors)
