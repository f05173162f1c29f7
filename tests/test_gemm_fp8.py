"""fp8 products of an x of 16 bits: by its codes, the same as made ahead, and as it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ridgeline
from ridgeline import ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Hopper's kernel makes the codes of one row, of at most 16384 columns, in pieces of 2048.
SHAPES = [
    (1, 64, 32),
    (1, 272, 80),
    (1, 2064, 48),
    (1, 16384, 48),
    (1, 16400, 32),
    (3, 1088, 160),
    (9, 272, 80),
]


def inputs(rows: int, K: int, N: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + K)
    x = torch.randn(rows, K, generator=generator).to(dtype)
    weight = torch.randn(N, K, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(N, generator=generator) + 0.5
    norm = torch.randn(K, generator=generator).to(dtype)
    return tuple(t.to(device) for t in (x, weight, scale, norm))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "K", "N"), SHAPES)
def test_codes_are_those_of_quantize_fp8(
    rows: int, K: int, N: int, dtype: torch.dtype, device: str
) -> None:
    x, weight, scale, _ = inputs(rows, K, N, device, dtype)
    residual = torch.randn(rows, N // 2, dtype=dtype, device=device)
    options = {"activation": "silu_mul", "residual": residual}
    codes, x_scale = ops.quantize_fp8(x)
    ahead = ops.fp8_linear(codes, weight, scale, x_scale=x_scale, out_dtype=dtype, **options)
    assert torch.equal(ops.fp8_linear(x, weight, scale, quantize_x=True, **options), ahead)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "K", "N"), SHAPES)
def test_normalized_codes_are_those_of_rmsnorm(
    rows: int, K: int, N: int, dtype: torch.dtype, device: str
) -> None:
    """Squares are summed in another order: a code at the edge of two may be the other."""
    x, weight, scale, norm = inputs(rows, K, N, device, dtype)
    codes, x_scale = ops.rmsnorm(x, norm, 1e-5, out_quant="fp8")
    ahead = ops.fp8_linear(codes, weight, scale, x_scale=x_scale, out_dtype=dtype).float()
    out = ops.fp8_linear(x, weight, scale, norm_weight=norm, norm_eps=1e-5, quantize_x=True)
    assert (out.float() - ahead).norm() <= 2e-3 * ahead.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite(bad: float, device: str) -> None:
    x, weight, scale, norm = inputs(1, 1088, 160, device, torch.bfloat16)
    x[0, 17] = bad
    for options in ({}, {"norm_weight": norm}):
        assert ops.fp8_linear(x, weight, scale, quantize_x=True, **options).isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_has_the_same_bits_among_fewer(device: str) -> None:
    """Of rows that one kernel takes: each is scaled by itself."""
    x, weight, scale, _ = inputs(6, 1088, 160, device, torch.bfloat16)
    whole = ops.fp8_linear(x, weight, scale, quantize_x=True, weights_ready=True)
    fewer = ops.fp8_linear(x[2:4], weight, scale, quantize_x=True, weights_ready=True)
    assert torch.equal(fewer, whole[2:4])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "K", "N", "blocks"),
    [
        *((rows, 400, 26880, False) for rows in (33, 48, 64)),
        *((rows, 400, 26880, True) for rows in (9, 48)),
        (64, 2304, 13856, True),  # K is cut
    ],
)
def test_every_bit_of_bfloat16_counts(rows: int, K: int, N: int, blocks: bool, device: str) -> None:
    """Wide tiles multiply two terms of e4m3: down to 1/896 of a row's largest value these are all
    of it, below they leave out 2^-17 of that. Scales of blocks are powers of two."""
    copies = (0, 8 * (N // 11))
    generator = torch.Generator().manual_seed(rows)
    exponents = torch.randint(-9, 1, (rows, K), generator=generator)
    signs = torch.randint(0, 2, (rows, K), generator=generator) * 2 - 1
    # Of the 2^7 significands, each in turn; rows far apart in size.
    significands = 1 + torch.arange(rows * K).reshape(rows, K) % 128 / 128
    largest = torch.exp2(torch.arange(rows) * 3.0 - 96)[:, None]
    x = signs * significands * torch.exp2(exponents.float())
    x[:, 7], x[:, ::50] = 1.75, x[:, ::50] * 2.0**-12
    x = (x * largest).bfloat16()
    weight = torch.zeros(N, K)
    for at in copies:
        weight[at : at + K] = torch.eye(K)
    weight = weight.to(torch.float8_e4m3fn).to(device)
    scale, by = torch.ones(1), torch.ones(N, K)
    if blocks:
        shape = (-(-N // 128), -(-K // 128))
        scale = torch.exp2(torch.randint(-3, 3, shape, generator=generator).float())
        by = scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    y = ops.fp8_linear(x.to(device), weight, scale.to(device)).cpu()
    most = x.abs().amax(1, keepdim=True).double()
    small = x.abs().double() < most / 896
    assert 0 < small.sum() < rows * K / 10
    for at in copies:
        copy = y[:, at : at + K] / by[at : at + K].diagonal()
        assert torch.equal(copy[~small], x[~small])
        assert ((copy.double() - x.double()).abs() <= 2.0**-17 * most).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "N"), [(900, 1816), (1100, 4168)])  # tiles of 128, 256 columns
def test_a_product_added_in_place_has_the_bits_of_product_and_sum(
    rows: int, N: int, dtype: torch.dtype
) -> None:
    x, weight, scale, _ = inputs(rows, 144, N, "cuda", torch.bfloat16)
    codes, x_scale = ops.quantize_fp8(x)
    scale[0] = 0.0
    residual = torch.randn(rows, N, device="cuda").to(dtype)
    residual[:, 0] = torch.finfo(dtype).tiny / 4  # subnormal, and so is the sum
    total = residual.clone()
    if torch.cuda.get_device_capability() == (9, 0):
        told = ridgeline.explain("fp8_linear_add", codes, weight, scale, total, x_scale=x_scale)
        assert len(told.kernels) == 1
    ops.fp8_linear_add(codes, weight, scale, total, x_scale=x_scale)
    product = ops.fp8_linear(codes, weight, scale, x_scale=x_scale, out_dtype=dtype)
    assert torch.equal(total, residual + product)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "K", "N", "kernels"),
    [
        pytest.param(3, 272, 1056, None, id="a group and a part"),
        pytest.param(1000, 400, 8192, 1, id="a pair of tiles a block"),
        pytest.param(4000, 272, 4608, 1, id="several, of tiles with edges"),
        pytest.param(1000, 240, 8192, 1, id="two stages of K"),
        pytest.param(1000, 400, 4096, 2, id="pairs that would leave SMs idle"),
    ],
)
def test_gated_codes_are_those_of_the_output(
    rows: int, K: int, N: int, kernels: int | None, device: str
) -> None:
    x, weight, scale, _ = inputs(
        min(rows, 40 if device == "cpu" else rows), K, N, device, torch.bfloat16
    )
    scale *= 0.02
    codes, x_scale = ops.quantize_fp8(x)
    codes[1] = 0.0  # of zeros
    x_scale[2, 0] = torch.inf
    # Scales of every size: the product's kernel makes them without divisions, and to the same bits.
    x_scale[3:, 0] *= 2.0 ** -(2 * torch.arange(len(x) - 3, device=device) % 70).float()
    x_scale[3:4, 0] = 1e30
    weight[300, 7] = torch.nan
    options = {"x_scale": x_scale, "activation": "silu_mul"}
    y, y_scale = ops.fp8_linear(codes, weight, scale, out_quant="fp8_group256", **options)
    expected = ops.quantize_fp8(ops.fp8_linear(codes, weight, scale, **options), "group256")
    known = ~expected[1].isnan()
    assert torch.equal(y_scale.isnan(), ~known)
    assert torch.equal(y_scale[known], expected[1][known])
    each = known.repeat_interleave(256, 1)[:, : N // 2]
    assert torch.equal(y.view(torch.uint8)[each], expected[0].view(torch.uint8)[each])
    assert bool((y_scale[1].isnan() | (y_scale[1] == 1)).all())
    if kernels and device == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        told = ridgeline.explain(
            "fp8_linear", codes, weight, scale, out_quant="fp8_group256", **options
        )
        assert len(told.kernels) == kernels


@pytest.mark.parametrize("device", DEVICES)
def test_gated_codes_of_a_part_of_a_weight_one_scale_and_a_chain(device: str) -> None:
    """A weight of wider rows, one scale for x and one for it, and a launch ahead of its input."""
    rows = 1000 if device == "cuda" else 20
    x, wide, _, _ = inputs(rows, 400, 8192, device, torch.bfloat16)
    weight, scale = wide[:, 16:272], torch.full((1,), 0.02, device=device)
    codes, x_scale = ops.quantize_fp8(x[:, :256].contiguous(), "tensor")
    options = {"x_scale": x_scale, "activation": "silu_mul"}
    made = ops.quantize_fp8(ops.fp8_linear(codes, weight, scale, **options), "group256")
    for ready in (False, True, True):
        y, y_scale = ops.fp8_linear(
            codes, weight, scale, out_quant="fp8_group256", weights_ready=ready, **options
        )
        assert torch.equal(y_scale, made[1])
        assert torch.equal(y.view(torch.uint8), made[0].view(torch.uint8))


def test_codes_cannot_be_made_of_codes() -> None:
    x, weight, scale, _ = inputs(1, 64, 32, "cpu", torch.bfloat16)
    codes, x_scale = ops.quantize_fp8(x)
    with pytest.raises(ValueError, match=r"quantize_x: expected False for x of float8_e4m3fn"):
        ops.fp8_linear(codes, weight, scale, x_scale=x_scale, quantize_x=True)
