"""8-bit codes and scales, to the bit: of quantize_fp8, and of norms with a quantised output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ridgeline
from op_table.quantize import _amax, spread

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
OUT = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}


def made(device: str, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)


@pytest.mark.parametrize("granularity", ["tensor", "row", "group", "block"])
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


@pytest.mark.parametrize("device", DEVICES)
def test_every_code_comes_back(device: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = codes.float()[codes.float().isfinite()].to(device)
    q, scale = ridgeline.ops.quantize_fp8(values, "tensor")
    assert scale.item() == 1.0
    assert torch.equal(q.float(), values)


@pytest.mark.parametrize("granularity", ["tensor", "row", "group", "block"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_smallest_values_keep_a_finite_inverse(device: str, granularity: Any) -> None:
    x = torch.full((2, 128), 1e-39, device=device)
    q, scale = ridgeline.ops.quantize_fp8(x, granularity)
    assert (scale == torch.finfo(torch.float32).tiny).all()
    assert torch.isfinite(q.float()).all()


@pytest.mark.parametrize("out_quant", ["fp8", "int8"])
@pytest.mark.parametrize("cols", [8, 259, 4096, 16384, 33000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_quantised_norms(device: str, dtype: torch.dtype, cols: int, out_quant: Any) -> None:
    x, weight = made(device, dtype, 3, cols), made(device, dtype, cols)
    residual = made(device, dtype, 3, cols, scale=2.0)
    total = residual + x
    code_dtype, largest = OUT[out_quant]
    outputs = {
        "plain": (ridgeline.ops.rmsnorm(x, weight, out_quant=out_quant), x),
        "residual": (ridgeline.ops.add_rmsnorm(x, residual, weight, out_quant=out_quant), total),
    }
    assert torch.equal(residual, total)
    for name, ((y, scale), normed) in outputs.items():
        exact = torch.nn.functional.rms_norm(normed.double(), (cols,), weight.double(), 1e-6)
        assert y.dtype == code_dtype and y.shape == x.shape, name
        assert scale.dtype == torch.float32 and scale.shape == (3, 1), name
        torch.testing.assert_close(
            scale.double(), exact.abs().amax(-1, keepdim=True) / largest, rtol=1e-5, atol=0
        )
        # Half a step: of integers everywhere, of e4m3 relative to the value down to its subnormals.
        half_step = scale.double() / 2 if out_quant == "int8" else exact.abs() * 2**-4
        smallest = scale.double() * 2**-10
        allowed = torch.maximum(half_step, smallest) * (1 + 2**-8) + 1e-4 * scale.double()
        assert ((y.double() * scale.double() - exact).abs() <= allowed).all(), name


@pytest.mark.parametrize("out_quant", ["fp8", "int8"])
@pytest.mark.parametrize("device", DEVICES)
def test_quantised_norms_of_zeros_and_nan(device: str, out_quant: Any) -> None:
    x = torch.zeros(3, 64, device=device)
    x[1, 5] = torch.nan
    y, scale = ridgeline.ops.rmsnorm(x, torch.ones(64, device=device), out_quant=out_quant)
    values = y.float() * scale
    assert scale[0].item() == scale[2].item() == 1.0
    assert (values[[0, 2]] == 0).all()
    assert values[1].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_another_code_is_refused(device: str) -> None:
    x = torch.zeros(1, 8, device=device)
    with pytest.raises(ValueError, match="out_quant: expected None, 'fp8' or 'int8', got 'int4'"):
        ridgeline.ops.rmsnorm(x, x[0], out_quant="int4")  # type: ignore[call-overload]
