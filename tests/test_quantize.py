"""8-bit codes and scales: of quantize_fp8 to the bit, and of ops with a quantised output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ridgeline
from op_table.quantize import _amax, spread

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OUT = {
    "fp8": (torch.float8_e4m3fn, 448.0),
    "int8": (torch.int8, 127.0),
    "fp8_group": (torch.float8_e4m3fn, 448.0),
}


def made(device: str, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)


@pytest.mark.parametrize("granularity", ["tensor", "row", "group", "group256", "block"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_codes_are_torchs_cast_of_the_scaled_values(
    device: str, dtype: torch.dtype, granularity: Any
) -> None:
    x = made(device, dtype, 140, 392)
    x[3] *= 1e-3  # codes of small values are subnormal where a scale is shared
    q, scale = (t.cpu() for t in ridgeline.ops.quantize_fp8(x, granularity))
    values = x.float().cpu()  # torch divides by a number exactly on the CPU alone
    assert torch.equal(scale, _amax(values, granularity) / 448)
    scaled = values * (1 / spread(scale, values, granularity))
    expected = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [40, 64, 130])  # eight clusters, as many values again, sixteen
def test_a_captured_scale_of_a_tensor_is_found_anew(rows: int) -> None:
    x = made("cuda", torch.bfloat16, rows, 8192)
    ridgeline.ops.quantize_fp8(x, "tensor")  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [ridgeline.ops.quantize_fp8(x, "tensor") for _ in range(3)]
    for factor in (1.0, 0.25, 8.0):
        x.mul_(factor)
        expected = x.float().abs().amax().cpu() / 448
        graph.replay()
        for codes, scale in captured:
            assert scale.item() == expected.item()
            assert (codes.float() * scale).sub_(x).abs().max() <= 17 * scale.item()


@pytest.mark.parametrize("device", DEVICES)
def test_every_code_comes_back(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes.float()[codes.float().isfinite()].to(device)
    q, scale = ridgeline.ops.quantize_fp8(values, "tensor")
    assert scale.item() == 1.0
    assert torch.equal(q.float(), values)


@pytest.mark.parametrize("granularity", ["tensor", "row", "group", "group256", "block"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_smallest_values_keep_a_finite_inverse(device: str, granularity: Any) -> None:
    x = torch.full((2, 128), 1e-39, device=device)
    q, scale = ridgeline.ops.quantize_fp8(x, granularity)
    assert (scale == torch.finfo(torch.float32).tiny).all()
    assert torch.isfinite(q.float()).all()


def assert_codes(y: Tensor, scale: Tensor, exact: Tensor, out_quant: str, what: str) -> None:
    """y times scale stands for exact (float64) as well as codes can."""
    dtype, largest = OUT[out_quant]
    granularity = "group" if out_quant == "fp8_group" else "row"
    amax = _amax(exact, granularity)
    assert y.dtype == dtype and y.shape == exact.shape, what
    assert scale.dtype == torch.float32 and scale.shape == amax.shape, what
    torch.testing.assert_close(scale.double(), amax / largest, rtol=1e-5, atol=0, msg=what)
    each = spread(scale.double(), exact, granularity)
    # Half a step: of integers everywhere, of e4m3 relative to the value down to its subnormals.
    half_step = each / 2 if out_quant == "int8" else exact.abs() * 2**-4
    allowed = torch.maximum(half_step, each * 2**-10) * (1 + 2**-8) + 1e-4 * each
    assert ((y.double() * each - exact).abs() <= allowed).all(), what


@pytest.mark.parametrize("out_quant", OUT)
@pytest.mark.parametrize("cols", [8, 259, 4096, 16384, 33000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_quantised_norms(device: str, dtype: torch.dtype, cols: int, out_quant: Any) -> None:
    x, weight = made(device, dtype, 3, cols), made(device, dtype, cols)
    residual = made(device, dtype, 3, cols, scale=2.0)
    total = residual + x
    outputs = {
        "plain": (ridgeline.ops.rmsnorm(x, weight, out_quant=out_quant), x),
        "residual": (ridgeline.ops.add_rmsnorm(x, residual, weight, out_quant=out_quant), total),
    }
    assert torch.equal(residual, total)
    for name, ((y, scale), normed) in outputs.items():
        exact = torch.nn.functional.rms_norm(normed.double(), (cols,), weight.double(), 1e-6)
        assert_codes(y, scale, exact, out_quant, name)


@pytest.mark.parametrize("out_quant", OUT)
@pytest.mark.parametrize("rows, cols", [(3, 8), (3, 259), (5, 4096), (150, 1200), (2, 33000)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_quantised_products(
    device: str, dtype: torch.dtype, rows: int, cols: int, out_quant: Any
) -> None:
    x = made(device, dtype, rows, 2 * cols, scale=2.0)
    gate, up = x.double().chunk(2, -1)
    y, scale = ridgeline.ops.silu_mul(x, out_quant=out_quant)
    assert_codes(y, scale, torch.nn.functional.silu(gate) * up, out_quant, "silu_mul")


@pytest.mark.parametrize("out_quant", OUT)
@pytest.mark.parametrize("op", ["rmsnorm", "silu_mul"])
@pytest.mark.parametrize("device", DEVICES)
def test_quantised_outputs_of_zeros_and_nan(device: str, op: str, out_quant: Any) -> None:
    x = torch.zeros(3, 64, device=device)
    x[1, 5] = torch.nan
    if op == "rmsnorm":
        y, scale = ridgeline.ops.rmsnorm(x, torch.ones(64, device=device), out_quant=out_quant)
    else:
        y, scale = ridgeline.ops.silu_mul(x, out_quant=out_quant)
    values = y.float() * scale
    assert scale[0].item() == scale[2].item() == 1.0
    assert (values[[0, 2]] == 0).all()
    assert values[1].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_another_code_is_refused(device: str) -> None:
    x = torch.zeros(1, 8, device=device)
    with pytest.raises(ValueError, match="out_quant: .*'int8' or 'fp8_group', got 'int4'"):
        ridgeline.ops.rmsnorm(x, x[0], out_quant="int4")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="out_quant: .*got 'int4'"):
        ridgeline.ops.silu_mul(x, out_quant="int4")  # type: ignore[call-overload]


@pytest.mark.parametrize("out_quant", ["fp8", "fp8_group", "int8"])
@pytest.mark.parametrize("device", DEVICES)
def test_rows_without_columns_have_scale_one(device: str, out_quant: Any) -> None:
    x = torch.rand(2, 0, device=device)
    codes, scale = ridgeline.ops.rmsnorm(x, x[0], out_quant=out_quant)
    assert codes.shape == (2, 0) and bool((scale == 1).all())
    if out_quant != "int8":
        codes, scale = ridgeline.ops.silu_mul(x, out_quant=out_quant)
        assert codes.shape == (2, 0) and bool((scale == 1).all())


def test_what_to_skip_may_be_one_name() -> None:
    """Not a list of its letters, one of which a layer may be called."""
    model = torch.nn.ModuleDict({"d": torch.nn.Linear(64, 64), "head": torch.nn.Linear(64, 64)})
    done = ridgeline.quantize_(model, "fp8", skip="head")
    assert done.layers == ("d",) and done.left == (("head", "named in skip"),)
    with pytest.raises(TypeError, match=r"skip: expected a name or a list of names, got \[1\]"):
        ridgeline.quantize_(model, "fp8", skip=[1])  # type: ignore[list-item]


def test_what_was_not_observed_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    with pytest.raises(TypeError, match="seen: expected what ridgeline.observe gave, got 5"):
        ridgeline.quantize_(model, "int8", seen=5)
    with pytest.raises(TypeError, match="seen: expected what ridgeline.observe gave, got None"):
        ridgeline.smooth_(model, None)  # type: ignore[arg-type]
