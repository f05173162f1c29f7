"""Every row of the op table, on every device and dtype, and through torch's transforms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ridgeline
from numerics import as_tuple, assert_close, competitor_bound, to_float64
from op_table import Context, Error, OpCase, Sample, all_cases

CASES = all_cases()
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def context_for(device: str, dtype: torch.dtype, seed: int = 0) -> Context:
    generator = torch.Generator().manual_seed(seed)
    return Context(torch.device(device), dtype, generator)


def points(attribute: str) -> list[Any]:
    """(case, sample, dtype) of every sample or error, with readable ids."""
    found = []
    for case in CASES:
        for index, sample in enumerate(getattr(case, attribute)):
            dtypes = case.dtypes
            if isinstance(sample, Error):
                dtypes = (sample.dtype or case.dtypes[0],)
            for dtype in dtypes:
                name = f"{case.name}-{index}-{str(dtype).removeprefix('torch.')}"
                found.append(pytest.param(case, sample, dtype, id=name))
    return found


def alone_points() -> list[Any]:
    """(case, sample) of every sample; a case's first is of the subset for compute-sanitizer."""
    return [
        pytest.param(
            case, sample, id=f"{case.name}-{index}", marks=() if index else pytest.mark.sanitize
        )
        for case in CASES
        for index, sample in enumerate(case.samples)
    ]


def clone(inputs: dict[str, Any]) -> dict[str, Any]:
    """Copies with the same strides and the same alignment: an op may choose its route by them."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.numel() == 0:
            return value
        offset = value.data_ptr() % 16 // value.element_size()
        span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride()))
        storage = torch.empty(offset + span, dtype=value.dtype, device=value.device)
        storage[offset:].copy_(value.as_strided((span,), (1,)))
        return storage.as_strided(value.shape, value.stride(), offset)

    return {name: copy(value) for name, value in inputs.items()}


def outputs_of(case: OpCase, function: Any, inputs: dict[str, Any]) -> tuple[Tensor, ...]:
    """Outputs, then the mutated arguments."""
    result = as_tuple(function(**inputs))
    return result + tuple(inputs[name] for name in case.mutates)


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    flat_a, flat_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(flat_a, flat_b)


def skip_unless_covered(case: OpCase, device: str) -> None:
    if device not in case.devices:
        pytest.skip(f"{case.name} is not made for {device}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case, sample, dtype", points("samples"))
def test_matches_float64(case: OpCase, sample: Sample, dtype: torch.dtype, device: str) -> None:
    skip_unless_covered(case, device)
    inputs = sample.make(context_for(device, dtype))
    kept = clone(inputs)
    actual = outputs_of(case, case.op, inputs)
    expected = as_tuple(case.reference(**{k: to_float64(v) for k, v in kept.items()}))
    assert len(actual) == len(expected), "the reference returns as many tensors as the op"
    rival: tuple[Any, ...] = (None,) * len(actual)
    if case.competitor is not None:
        rival = as_tuple(case.competitor(**clone(kept)))

    for i, (got, want, other) in enumerate(zip(actual, expected, rival)):
        what = f"{case.name} output {i} ({sample.why})"
        assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
        got64, want64 = to_float64(got), want.double()
        if not got.is_floating_point() or case.bound == "exact":
            assert torch.equal(got64.double(), want64) or _equal_with_nan(got64.double(), want64), (
                f"{what}: not exactly the reference"
            )
        elif case.competitor is not None:
            bound_dtype = got.dtype if got.is_floating_point() else dtype
            assert_close(got64, want64, competitor_bound(other.cpu(), want64, bound_dtype), what)
        else:
            assert callable(case.bound)
            assert_close(got64, want64, case.bound(want64), what)

    for name, value in inputs.items():
        if isinstance(value, Tensor) and name not in case.mutates:
            assert same_bits(value, kept[name]), f"{case.name} changed its input {name}"

    again = outputs_of(case, case.op, clone(kept))
    for i, (first, second) in enumerate(zip(actual, again)):
        assert same_bits(first, second), f"{case.name} output {i}: two equal calls differ"


def _equal_with_nan(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case, error, dtype", points("errors"))
def test_refuses(case: OpCase, error: Error, dtype: torch.dtype, device: str) -> None:
    skip_unless_covered(case, device)
    inputs = error.make(context_for(device, dtype))
    kept = clone(inputs)
    with pytest.raises((ValueError, TypeError), match=error.match):
        case.op(**inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            assert same_bits(value, kept[name]), f"a refused {case.name} changed {name}"


def tensors_of(case: OpCase) -> tuple[dict[str, Any], list[str]]:
    """The first sample on the CPU, and which of its arguments are tensors."""
    inputs = first_full_sample(case).make(context_for("cpu", case.dtypes[0]))
    return inputs, [name for name, value in inputs.items() if isinstance(value, Tensor)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refuses_meta_beside_another_device(case: OpCase) -> None:
    inputs, names = tensors_of(case)
    for name in names:
        mixed = inputs | {name: inputs[name].to("meta")}
        if len(names) == 1 and "weight" not in inputs:
            assert all(y.is_meta for y in as_tuple(case.op(**mixed)))
        else:
            with pytest.raises(ValueError, match="expected on the device of .*meta"):
                case.op(**mixed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refuses_by_name_what_is_no_tensor_or_has_no_dimension(case: OpCase) -> None:
    inputs, names = tensors_of(case)
    required = {"weight", "weight_scale", "k", "v", "k_cache", "slots"}
    for name in names:
        number = torch.zeros((), dtype=inputs[name].dtype)
        for other in [number] * (not name.endswith("scale")) + [None] * (name in required):
            with pytest.raises(ValueError, match=f"{name}: expected .*got"):
                case.op(**inputs | {name: other})


class _RecordCalls(TorchDispatchMode):
    """Keeps the ridgeline ops called, with their arguments as they were before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "ridgeline":
            named = {str(i): a for i, a in enumerate(args)}
            self.calls.append((func, tuple(clone(named).values()), clone(kwargs)))
        return func(*args, **kwargs)


def first_full_sample(case: OpCase) -> Sample:
    """The first sample: by convention a small one with something in it."""
    return case.samples[0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_opcheck(case: OpCase, device: str) -> None:
    skip_unless_covered(case, device)
    inputs = first_full_sample(case).make(context_for(device, case.dtypes[-1]))
    with _RecordCalls() as recorded:
        case.op(**inputs)
    assert recorded.calls, f"{case.name} called no ridgeline op"
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for func, args, kwargs in recorded.calls:
        # torch's schema test compares arguments with operations that float8 does not have.
        has_fp8 = any(getattr(a, "dtype", None) == torch.float8_e4m3fn for a in args)
        torch.library.opcheck(func, args, kwargs, test_utils=tests[1:] if has_fp8 else tests)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiles_to_the_same_bits(case: OpCase, device: str) -> None:
    skip_unless_covered(case, device)
    inputs = first_full_sample(case).make(context_for(device, case.dtypes[-1]))
    kept = clone(inputs)
    eager = outputs_of(case, case.op, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(case.op, fullgraph=True, backend="aot_eager")
    traced = outputs_of(case, compiled, kept)
    assert all(map(same_bits, eager, traced))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_graph_replay_equals_eager(case: OpCase) -> None:
    skip_unless_covered(case, "cuda")
    if not case.graph_safe:
        pytest.skip(f"{case.name} is documented as not graph-safe")
    inputs = first_full_sample(case).make(context_for("cuda", case.dtypes[-1]))
    kept = clone(inputs)
    eager = outputs_of(case, case.op, clone(kept))
    case.op(**clone(kept))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs_of(case, case.op, inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            value.copy_(kept[name])
    for result in captured[: len(captured) - len(case.mutates)]:
        if result.is_floating_point() and result.dtype.itemsize > 1:
            result.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(same_bits, eager, captured))


@pytest.mark.gpu
@pytest.mark.sanitize_all
@pytest.mark.parametrize("case, sample", alone_points())
def test_runs_alone(case: OpCase, sample: Sample) -> None:
    """The op and no reference: what compute-sanitizer watches. Its racecheck breaks down in the
    kernels of cuBLAS, which references, competitors and some products of this library call."""
    skip_unless_covered(case, "cuda")
    inputs = sample.make(context_for("cuda", case.dtypes[-1]))
    if case.name == "linear":
        choices = ridgeline.explain("linear", **inputs).choices
        if any(choice.startswith("library") for choice in choices):
            pytest.skip("a product of cuBLASLt")
    first = outputs_of(case, case.op, clone(inputs))
    second = outputs_of(case, case.op, inputs)
    torch.cuda.synchronize()
    assert all(map(same_bits, first, second))


def test_every_op_has_a_row() -> None:
    public = _public_ops_with_kernels()
    covered = {case.name for case in CASES} | {tag for case in CASES for tag in case.tags}
    assert public == public & covered, f"without a row in the table: {sorted(public - covered)}"


def test_every_op_has_a_cost() -> None:
    from ridgeline.roofline import costed_ops

    public = _public_ops_with_kernels()
    assert public <= set(costed_ops()), f"without a cost: {sorted(public - set(costed_ops()))}"


def _public_ops_with_kernels() -> set[str]:
    registered = {
        name.removeprefix("ridgeline::") for name in torch._C._dispatch_get_all_op_names()
    }
    return registered & set(ridgeline.ops.__all__)
