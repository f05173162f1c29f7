"""Experts in 4-bit floats: what is packed is what files mean, to the bit."""

import pytest
import torch

from op_table.grouped import mxfp4_of
from ridgeline import ops
from test_quantized_checkpoints import four_bit_floats

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(  # whole blocks; rows and columns that are padded; nothing
    ("experts", "N", "K"), [(3, 32, 128), (2, 40, 96), (1, 5, 32), (0, 16, 64), (2, 0, 64)]
)
def test_packed_values_are_those_of_the_file(
    experts: int, N: int, K: int, dtype: torch.dtype, device: str
) -> None:
    blocks, scales = mxfp4_of(experts, N, K, torch.Generator().manual_seed(0))
    packed = ops.Fp4Experts.from_mxfp4(blocks.to(device), scales.to(device))
    assert (packed.N, packed.K) == (N, K)
    assert packed.packed.shape == (experts, -(-N // 16), -(-K // 64), 512 + 2 * 16)
    values = packed.dequantize(dtype)
    assert values.shape == (experts, N, K) and values.dtype == dtype
    if blocks.numel():
        scales[0, 0, 0] = 127  # a group of zeros has any exponent
        assert torch.equal(values.double().cpu(), four_bit_floats(blocks, scales))


def test_a_rotation_brings_a_code_to_the_exponents_of_bfloat16() -> None:
    """Codes of nibbles j and j + 4 of int4's words, to bits 15 and 8 to 6. Padding is zeros."""
    blocks, scales = mxfp4_of(2, 48, 96, torch.Generator().manual_seed(0))
    codes = torch.stack((blocks & 15, blocks >> 4), -1).view(2 * 48, 96)
    int4 = ops.Int4Weight.from_quantized(codes, torch.ones(3, 96))
    words = (ops.Int4Experts.from_rows(int4, 2).packed.long() & 0xFFFFFFFF).view(2, 3, 2, 32, 4)
    words[:, :, 1, :, 2:] = 0  # columns from 96 on
    blocks_of = ops.Fp4Experts.from_mxfp4(blocks, scales).packed
    packed = blocks_of[..., :512].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    assert torch.equal(blocks_of[:, :, 0, 512 + 16 :], scales[:, :, 1].view(2, 3, 16))

    def turned(right: int) -> torch.Tensor:
        return (packed >> right | packed << (32 - right)) & 0xFFFFFFFF

    low, high = turned(4), turned(28)
    fourth = low & ~0x01000100 | high & 0x01000100
    for j, of in enumerate((turned(0), turned(6), turned(26), fourth)):
        for e in range(2):
            half = of >> 16 * e
            code = half >> 12 & 8 | half >> 6 & 7
            assert torch.equal(code, words.view_as(packed) >> 4 * (j + 4 * e) & 15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("N", [16, 48])
@pytest.mark.parametrize("K", [32, 96, 128, 1056])
def test_the_product_takes_each_weight_as_it_is(N: int, K: int, dtype: torch.dtype) -> None:
    """By rows that have a single one; more columns than the CPU expands at once."""
    blocks, scales = mxfp4_of(2, N, K, torch.Generator().manual_seed(0))
    weight = ops.Fp4Experts.from_mxfp4(blocks, scales)
    offsets = torch.tensor([0, K, 2 * K], dtype=torch.int32)
    x = torch.eye(K).repeat(2, 1).to(dtype)
    out = ops.grouped_fp4_linear(x, weight, offsets)
    assert torch.equal(out.view(2, K, N), weight.dequantize(dtype).transpose(1, 2))


def inputs_of(N: int = 16, K: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return mxfp4_of(2, N, K, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("biased", "actual"), [(0, "-127 to "), (129, ".* to 2"), (255, ".* to 128")]
)
def test_exponents_that_no_product_takes_are_refused(biased: int, actual: str) -> None:
    blocks, scales = inputs_of()
    blocks[1, 3, 1, 0], scales[1, 3, 1] = 1, biased
    message = f"scales: expected exponents from -126 to 1, got {actual}"
    with pytest.raises(ValueError, match=message):
        ops.Fp4Experts.from_mxfp4(blocks, scales)
    blocks[1, 3, 1] = 0x08  # zeros of either sign
    ops.Fp4Experts.from_mxfp4(blocks, scales)


def test_what_is_not_of_four_bits_is_refused() -> None:
    blocks, scales = inputs_of()
    for wrong in (blocks[0], blocks[..., :8], blocks.int()):
        with pytest.raises(ValueError, match=r"blocks: expected uint8 \[experts, N, K / 32, 16\]"):
            ops.Fp4Experts.from_mxfp4(wrong, scales)
    for wrong in (scales[:1], scales.int()):
        with pytest.raises(ValueError, match=r"scales: expected uint8 \[2, 16, 2\], got"):
            ops.Fp4Experts.from_mxfp4(blocks, wrong)


def test_a_weight_that_is_not_of_four_bit_floats_is_named() -> None:
    x, offsets = torch.ones(2, 64), torch.tensor([0, 2], dtype=torch.int32)
    int4 = ops.Int4Experts.from_rows(ops.pack_int4(torch.ones(32, 64), 32), 1)
    with pytest.raises(TypeError, match="weight: expected an Fp4Experts, got Int4Experts"):
        ops.grouped_fp4_linear(x, int4, offsets)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", torch.float16, "x: expected dtype bfloat16 or float32, got float16"),
        pytest.param("cuda", torch.float16, "x: expected dtype bfloat16, got float16", marks=GPU),
        pytest.param("cuda", torch.float32, "x: expected dtype bfloat16, got float32", marks=GPU),
    ],
)
def test_inputs_have_the_exponents_of_weights(
    device: str, dtype: torch.dtype, message: str
) -> None:
    weight = ops.Fp4Experts.from_mxfp4(*(t.to(device) for t in inputs_of()))
    offsets = torch.tensor([0, 2, 2], dtype=torch.int32, device=device)
    x = torch.ones(2, 64, dtype=dtype, device=device)
    with pytest.raises(ValueError, match=message):
        ops.grouped_fp4_linear(x, weight, offsets)
