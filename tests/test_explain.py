"""`ridgeline.explain`: the route of a call, told without taking it."""

from __future__ import annotations

import pytest
import torch

import ridgeline
from op_table import OpCase, Sample
from ridgeline._explain import _copied, _kernel
from ridgeline.roofline import machine
from ridgeline.roofline.machine import Roofs
from ridgeline.roofline.timing import time_call
from test_ops import CASES, clone, context_for, same_bits

ROOFS = Roofs("test", copy=1e12, read=1e12, flops={"fp32": 1e12, "bf16": 1e14}, launch_us=1.0)


def test_cpu_has_one_route() -> None:
    explanation = ridgeline.explain("softmax", torch.zeros(4, 8), strict=True, roofs=ROOFS)
    assert explanation.kernels == ()
    assert "threads" in explanation.choices[0]
    assert explanation.cost.bytes == 4 * 8 * 4 * 2
    assert (explanation.floor_us, explanation.bound) == (1.0, "launch")
    assert "softmax on the CPU" in str(explanation)


def test_without_a_gpu_the_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_measure", lambda device: device)
    assert machine.measure_roofs() == "cpu"
    assert time_call(lambda: (torch.zeros(8),), torch.neg).us > 0


def test_names_a_device_that_runs_nothing() -> None:
    explanation = ridgeline.explain("softmax", torch.empty(4, 8, device="meta"))
    assert explanation.device == "the device meta" and explanation.choices == ()


def test_refuses_an_unknown_op() -> None:
    with pytest.raises(ValueError, match=r"op: expected one of .*softmax.*; got 'sofmax'"):
        ridgeline.explain("sofmax", torch.zeros(4, 8))


def test_refuses_arguments_that_the_op_does_not_have() -> None:
    x, weight = torch.zeros(4, 8), torch.zeros(2, 8)
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        ridgeline.explain("linear")
    with pytest.raises(TypeError, match="unexpected keyword argument 'gelu'"):
        ridgeline.explain("linear", x, weight, gelu=True)


def test_a_kernel_is_told_in_the_words_of_its_source() -> None:
    name = "void ridgeline::(anonymous namespace)::rows<Tile<(int)64, A<__half> >>(RowParams)"
    kernel = _kernel("launch", name, *map(str, (132, 1, 4, 256, 1024, 90, 8, 2, 90, 1)))
    assert str(kernel) == (
        "rows<Tile<64, A<__half>>>\n    132 x 4 blocks of 256 threads, 2 an SM; 1024 bytes shared, "
        "90 registers, 8 bytes spilled; code for 90, chained"
    )
    one = _kernel("launch", "f", *map(str, (1, 1, 1, 32, 0, 16, 0, 1, 80, 0)))
    assert str(one) == (
        "f\n    1 blocks of 32 threads, 1 an SM; 0 bytes shared, 16 registers; code for 80"
    )


def test_measures_on_copies() -> None:
    """An op that writes, strided arguments, and a packed weight, whose tensors are copied too."""
    rows = torch.randn(1024, 4097)[:, 1:4097]
    assert "takes" not in str(ridgeline.explain("softmax", rows))
    explanation = ridgeline.explain("softmax", rows, roofs=ROOFS, measure=True)
    assert explanation.measured is not None and explanation.measured.cold
    share = explanation.floor_us / explanation.measured.us
    assert f"takes {explanation.measured.us:.2f} us, {share:.0%} of the roof" in str(explanation)
    few = ridgeline.explain("softmax", rows[:1], roofs=ROOFS, measure=True)
    assert str(few).endswith("us, in caches")
    (copy,) = _copied([rows], [])
    assert copy.stride() == rows.stride() and torch.equal(copy, rows)
    assert (copy.data_ptr() - rows.data_ptr()) % 16 == 0 and rows.data_ptr() % 16 != 0

    cache = torch.zeros(2, 4, 16, 2, 64)
    key, value = torch.randn(2, 3, 2, 64)
    slots = torch.arange(3)
    ridgeline.explain("write_kv", key, value, cache[0], cache[1], slots, measure=True)
    assert not cache.any()

    weight = ridgeline.ops.pack_int4(torch.randn(32, 128), group_size=32)
    copies: list[torch.Tensor] = []
    copy = _copied({"weight": [weight]}, copies)["weight"][0]
    assert isinstance(copy, ridgeline.ops.Int4Weight) and len(copies) == 2
    assert torch.equal(copy.packed, weight.packed)
    assert copy.packed.data_ptr() != weight.packed.data_ptr()


POINTS = [
    pytest.param(case, sample, id=f"{case.name}-{index}")
    for case in CASES
    if "cuda" in case.devices and hasattr(ridgeline.ops, case.name)
    for index, sample in enumerate(case.samples)
]


@pytest.mark.gpu
@pytest.mark.parametrize("case, sample", POINTS)
def test_runs_and_writes_nothing(case: OpCase, sample: Sample) -> None:
    """Each op of the table: inputs, in-place ones too, stay as they were, and real calls go on."""
    inputs = sample.make(context_for("cuda", case.dtypes[-1]))
    kept = clone(inputs)
    explanation = ridgeline.explain(case.name, **inputs)
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(value, kept[name]), f"explaining {case.name} changed {name}"
    for kernel in explanation.kernels:
        assert kernel.threads > 0 and kernel.registers > 0 and kernel.blocks_per_sm > 0, kernel
        assert "ridgeline::" not in kernel.name, "names are readable"
    case.op(**inputs)
    assert [k.name for k in ridgeline.explain(case.name, **inputs).kernels] == [
        k.name for k in explanation.kernels
    ]


@pytest.mark.gpu
def test_names_the_kernel() -> None:
    x, weight = torch.zeros(8, 4096, device="cuda"), torch.ones(4096, device="cuda")
    (kernel,) = ridgeline.explain("rmsnorm", x.bfloat16(), weight.bfloat16()).kernels
    assert kernel.name.startswith("rmsnorm_kernel<__nv_bfloat16")
    blocks = 4 if torch.cuda.get_device_capability() >= (9, 0) else 1  # a row: a cluster's
    assert kernel.grid == (8 * blocks, 1, 1)
    assert kernel.spilled_bytes == 0


@pytest.mark.gpu
def test_an_op_that_fails_leaves_no_trace_open() -> None:
    x = torch.randn(4, 64, device="cuda")
    with pytest.raises(ValueError, match="weight"):
        ridgeline.explain("rmsnorm", x, torch.ones(63, device="cuda"))
    torch.testing.assert_close(ridgeline.ops.softmax(x), x.softmax(-1))


@pytest.mark.gpu
def test_strict_refuses_a_slower_route() -> None:
    rows = torch.zeros(36, 65, device="cuda", dtype=torch.bfloat16)[:, :64]  # 130 bytes apart
    call = ("linear", rows[:4], rows[4:])
    assert "16 bytes" in ridgeline.explain(*call, batch_invariant=True).slower[0]
    with pytest.raises(RuntimeError, match=r"linear does not take its fastest route.*16 bytes"):
        ridgeline.explain(*call, batch_invariant=True, strict=True)


@pytest.mark.gpu
def test_measures_in_a_graph() -> None:
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    explanation = ridgeline.explain("linear", weight[:4], weight, measure=True)
    assert len(explanation.kernels) == 1
    assert explanation.measured is not None and explanation.measured.cold
    assert explanation.measured.us > 4, "32 MiB from memory, not from a cache"
