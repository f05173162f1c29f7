"""Epilogues of products by weights of 4 or 8 bits: what ends within a tile, what is left for the
next of the same block, gates and up rows that different warps have, and residuals that the copy
engine, or a vector, cannot reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from op_table.gemm import activate
from ridgeline import ops

FP8 = torch.float8_e4m3fn

SHAPES = [  # M, N, K
    (700, 2080, 384),  # a tile a block
    (2100, 8480, 1088),  # several, whose stages begin at each of the ring's four
    (2000, 4160, 384),  # tiles of 256 rows of expanded weights, two a block
    (1100, 4096, 128),  # one stage; int4 by tiles of 192 rows, two a block
    (2100, 2304, 512),  # 128 columns of 8-bit rows, several tiles a block, a box each where gated
    (300, 9824, 640),  # tiles of 112 gates, 132 of them; the last of a row tile's have fewer
    (700, 9824, 128),  # gates that begin within a block of scales, and one block of columns
]

FEW_ROWS = [
    (16, 4096, 1536),  # tiles of 64 weight rows by turns, K cut in two
    (64, 4096, 1536),
    (37, 4640, 2560),  # the last tiles have fewer rows
    (64, 9216, 1152),  # tiles of 128, two blocks an SM
    (64, 29440, 256),  # wide tiles, an SM each, of fp8
    (33, 2056, 384),  # gated, four columns are no vector
]

KINDS = ["int8", "fp8", "fp8, scales of blocks", "fp8 weight", "int4", "int4 by fp8"]

# Activation, bias, residual.
EPILOGUES = [
    (None, False, None),
    (None, True, None),
    (None, False, "whole"),
    (None, True, "whole"),
    (None, True, "off 16 bytes"),
    (None, False, "one row for all"),
    ("gelu", True, None),
    ("gelu_tanh", False, "whole"),
    ("silu", False, None),
    ("relu", True, "off 16 bytes"),
    ("silu_mul", False, None),
    ("silu_mul", True, None),
    ("silu_mul", False, "whole"),
    ("gelu_mul", True, "off 16 bytes"),
]

Product = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any], Tensor, Tensor]


def product_of(kind: str, M: int, N: int, K: int, dtype: torch.dtype) -> Product:
    """The op, its operands, and the values of x and of the weight."""
    generator = torch.Generator("cuda").manual_seed(M)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device="cuda") + 0.5

    x, weight = normal(M, K), normal(N, K) * K**-0.5
    if kind == "int4":
        packed = ops.pack_int4(weight.to(dtype), 64, zero_point=True)
        return ops.int4_linear, (x.to(dtype), packed), {}, x.to(dtype), packed.dequantize()
    of_rows = scales(M)
    of_x = x.to(FP8).double() * of_rows.double()[:, None]
    if kind == "int4 by fp8":
        packed = ops.pack_int4(weight.to(dtype), 128 if K % 128 == 0 else -1)
        exact = replace(packed, scales=packed.scales.float()).dequantize()  # sums are scaled
        return ops.int4_linear, (x.to(FP8), packed), {"x_scale": of_rows}, of_x, exact
    if kind == "int8":
        codes_of_x, codes = (
            (v * scale).round().clamp(-127, 127).to(torch.int8)
            for v, scale in ((x, 32), (weight, 512))
        )
        options = {"x_scale": of_rows / 32, "out_dtype": dtype}
        of_columns = scales(N) / 512
        values = codes.double() * of_columns.double()[:, None]
        of_x = codes_of_x.double() * options["x_scale"].double()[:, None]
        return ops.int8_linear, (codes_of_x, codes, of_columns), options, of_x, values
    codes = (weight * 16).to(FP8)
    if kind == "fp8, scales of blocks":
        of_groups, of_blocks = scales(M, -(-K // 128)), scales(-(-N // 128), -(-K // 128)) / 16
        options = {"x_scale": of_groups, "out_dtype": dtype}
        by_rows = of_blocks.double().repeat_interleave(128, 0)[:N]
        values = codes.double() * by_rows.repeat_interleave(128, 1)[:, :K]
        of_x = x.to(FP8).double() * of_groups.double().repeat_interleave(128, 1)[:, :K]
        return ops.fp8_linear, (x.to(FP8), codes, of_blocks), options, of_x, values
    of_columns = scales(N) / 16
    values = codes.double() * of_columns.double()[:, None]
    if kind == "fp8 weight":
        return ops.fp8_linear, (x.to(dtype), codes, of_columns), {}, x.to(dtype), values
    options = {"x_scale": of_rows, "out_dtype": dtype}
    return ops.fp8_linear, (x.to(FP8), codes, of_columns), options, of_x, values


def are_rounded(kind: str, N: int, activation: str | None) -> bool:
    """Whether operands become ``dtype``: up rows that begin within a block of scales leave tiles of
    fp8 rows, each of which has one."""
    gated = activation in ("silu_mul", "gelu_mul")
    return kind == "fp8, scales of blocks" and gated and N // 2 % 128 != 0


def residual_of(layout: str, M: int, columns: int, dtype: torch.dtype) -> Tensor:
    wide = torch.randn(M, columns + 8, device="cuda").to(dtype)
    if layout == "whole":
        return wide[:, :columns].contiguous()
    if layout == "off 16 bytes":
        return wide[:, 4 : columns + 4]
    assert layout == "one row for all"
    return wide[:1, :columns].expand(M, -1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("M", "N", "K"), SHAPES + FEW_ROWS)
def test_epilogues(kind: str, M: int, N: int, K: int, dtype: torch.dtype) -> None:
    op, args, options, x, weight = product_of(kind, M, N, K, dtype)
    if M <= 64 and kind == "fp8, scales of blocks":
        x = x.to(dtype)  # by a kernel ahead
    product = x.double() @ weight.double().T
    of_x = x if K <= 128 else x.to(dtype)  # of one block, a row's one scale is left to its sums
    of_rounded = of_x.double() @ weight.to(dtype).double().T
    torch.manual_seed(M)
    # For few rows weights times their blocks' scales may become ``dtype``, too, as those of shapes
    # that no kernel of Hopper's takes.
    most = 2e-2 if M > 64 else 8e-2
    for activation, has_bias, layout in EPILOGUES:
        fused: dict[str, Any] = {"activation": activation}
        wanted = of_rounded if are_rounded(kind, N, activation) else product
        if has_bias:
            fused["bias"] = torch.randn(N, device="cuda").to(dtype)
            wanted = wanted + fused["bias"].double()
        gates = wanted.chunk(2, -1)[0]
        wanted = activate(wanted, activation)
        if layout is not None:
            fused["residual"] = residual_of(layout, M, wanted.shape[1], dtype)
            wanted = wanted + fused["residual"].double()
        out = op(*args, **options, **fused).double()
        error = (out - wanted).abs() - 1.6e-2 * wanted.abs()
        if activation in ("silu_mul", "gelu_mul"):  # what an up row is off by is times its gate's
            error /= activate(gates, activation.removesuffix("_mul")).abs().clamp(min=1)
        assert error.max() < most, (activation, has_bias, layout)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("M", "N", "K"),
    [(300, 65536, 640), (512, 4096, 640), (16, 4096, 1536), (64, 32768, 640)],
    ids=["256 columns", "128 columns", "few rows, K cut", "few rows"],
)
def test_gelu_of_every_bfloat16(M: int, N: int, K: int) -> None:
    """Sums are zero, so that x is the bias: GELU is rounded once, a little from where it is."""
    x = torch.randn(M, K, device="cuda").to(FP8)
    weight = torch.zeros(N, K, device="cuda").to(FP8)
    patterns = torch.arange(65536, device="cuda", dtype=torch.int32).to(torch.int16)
    of_columns, of_rows = torch.ones(N, device="cuda"), torch.ones(M, device="cuda")
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "activation": "gelu"}
    for bias in patterns.view(torch.bfloat16).split(N):
        out = ops.fp8_linear(x, weight, of_columns, bias, x_scale=of_rows, **options)
        assert torch.equal(out[:1].expand_as(out).view(torch.int16), out.view(torch.int16))
        wanted = torch.nn.functional.gelu(bias.double())
        assert torch.equal(out[0].isnan(), wanted.isnan())
        known = wanted.isfinite()
        error = (out[0].double() - wanted)[known].abs()
        rounding = 2**-8 * wanted[known].abs()
        near = rounding + torch.where(bias[known] < 0, 9.2e-3, 9.2e-4) * wanted[known].abs() + 1e-38
        assert (error <= torch.where(bias[known] < -3, rounding + 2.4e-4, near)).all()
        assert torch.equal(out[0][wanted.isinf()].double(), wanted[wanted.isinf()])
