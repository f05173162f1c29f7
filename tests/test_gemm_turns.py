"""Hopper's dense products with an activation in them: the choice, and tiles that end within."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ridgeline
from gemm_choice import choice_of
from ridgeline import ops

F = torch.nn.functional


def path_of(M: int, N: int, K: int, activation: str, dtype: str = "bfloat16") -> str:
    return str(choice_of(M, N, K, activation=activation, dtype=dtype)["path"])


@pytest.mark.parametrize(
    ("M", "N", "activation", "path"),
    [
        (8192, 4096, "gelu", "turns"),
        (8192, 4096, "gelu_tanh", "turns"),
        (8192, 4096, "silu_mul", "library"),
        (513, 28672, "silu_mul", "library"),
        (512, 28672, "silu_mul", "turns"),
        (8192, 4096, "none", "library"),
        (8192, 4096, "silu", "library"),
        (8192, 4104, "gelu", "library"),  # the copy engine takes 16 weight rows at a time
        (423, 4096, "gelu", "turns"),  # 128 tiles, a fifth of them empty
        (422, 4096, "gelu", "turns"),  # of little K fewer of them do
        (384, 4096, "gelu", "turns"),  # 96
        (512, 5120, "gelu", "library"),  # 160: most SMs have one, some two
        (640, 4096, "gelu", "library"),  # as many
        (640, 4608, "gelu", "turns"),  # 180
        (96, 28672, "silu_mul", "library"),
        (97, 28672, "silu_mul", "turns"),
        (129, 28672, "silu_mul", "library"),
        (192, 28672, "silu_mul", "library"),
        (256, 28672, "silu_mul", "turns"),
    ],
)
def test_tiles_that_fill_the_sms_are_taken(M: int, N: int, activation: str, path: str) -> None:
    assert path_of(M, N, 1024, activation) == path
    assert path_of(M, N, 1024, activation, "float32") == "library"


@pytest.mark.parametrize(
    ("M", "N", "options", "path"),
    [
        (423, 4096, {}, "turns"),  # as with an activation
        (422, 4096, {}, "library"),
        (96, 28672, {}, "library"),
        (97, 28672, {}, "turns"),
        (4096, 28672, {"activation": "gelu"}, "library"),  # one or the other
        (4096, 28672, {"activation": "silu_mul"}, "library"),
        (4096, 28672, {"dtype": "float32"}, "library"),
        (4096, 28672, {"invariant": True}, "grouped"),
    ],
)
def test_residuals_are_added_in_such_tiles(
    M: int, N: int, options: dict[str, Any], path: str
) -> None:
    assert choice_of(M, N, 1024, residual=True, **options)["path"] == path


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    y = F.linear(x, weight, bias)
    if activation == "silu_mul":
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up
    return F.gelu(y, approximate="none" if activation == "gelu" else "tanh")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu_mul"])
@pytest.mark.parametrize(
    ("M", "N", "K", "bias"),
    [
        (512, 4096, 64, True),  # one stage of K, one tile a block
        (487, 4080, 72, True),  # rows, weight rows and columns that end within a tile
        (440, 12288, 1024, False),  # several tiles a block, the last of one warpgroup's rows
    ],
)
def test_equals_the_product_and_its_activation(
    dtype: torch.dtype, activation: str, M: int, N: int, K: int, bias: bool
) -> None:
    """Rows and columns around x and the weight are NaN."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute 9.0")
    generator = torch.Generator("cuda").manual_seed(M)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    def inside(values: Tensor) -> Tensor:
        rows, columns = values.shape
        around = torch.full((rows + 1, columns + 8), math.nan, device="cuda", dtype=dtype)
        around[:rows, :columns] = values
        return around[:rows, :columns]

    x, weight = inside(normal(M, K)), inside(normal(N, K) / math.sqrt(K))
    added = normal(N) if bias else None
    found = ridgeline.explain("linear", x, weight, added, activation=activation)
    assert [kernel.name for kernel in found.kernels if "turns_kernel" in kernel.name]
    ours = ops.linear(x, weight, added, activation=activation)
    wide = (x.double(), weight.double(), None if added is None else added.double())
    expected = exact(*wide, activation)
    theirs = exact(x, weight, added, activation)
    assert ours.isfinite().all()
    assert (ours.double() - expected).norm() <= 1.5 * (theirs.double() - expected).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("M", "N", "K", "bias", "begin"),
    [
        (512, 4096, 64, True, 0),  # one stage of K, one tile a block
        (487, 4080, 72, False, 8),  # rows and columns that end within a tile
        (440, 12288, 1024, True, 16),  # several tiles a block, the last of one warpgroup's rows
        (487, 4080, 72, True, 4),  # residuals that the copy engine cannot reach: other kernels'
        (487, 4080, 72, True, None),  # ... all rows of which are one
    ],
)
def test_a_residual_comes_while_the_other_tile_is_multiplied(
    dtype: torch.dtype, M: int, N: int, K: int, bias: bool, begin: int | None
) -> None:
    """Columns around the residual are NaN."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is for compute 9.0")
    generator = torch.Generator("cuda").manual_seed(N)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=dtype)

    x, weight = normal(M, K), normal(N, K) / math.sqrt(K)
    added = normal(N) if bias else None
    if begin is None:
        residual = normal(1, N).expand(M, N)
    else:
        around = torch.full((M + 1, N + 24), math.nan, device="cuda", dtype=dtype)
        residual = around[:M, begin : begin + N]
        residual.copy_(normal(M, N))
    found = ridgeline.explain("linear", x, weight, added, residual=residual)
    by_turns = any("turns_kernel" in kernel.name for kernel in found.kernels)
    assert by_turns == (begin is not None and begin % 8 == 0)
    out = ops.linear(x, weight, added, residual=residual)
    exact = x.double() @ weight.double().T + residual.double()
    if added is not None:
        exact += added.double()
    rounding = (exact.to(dtype).double() - exact).norm()
    once = 1.01 if by_turns else 1.5  # the library rounds the product, and then the sum
    assert (out.double() - exact).norm() <= once * rounding


@pytest.mark.gpu
def test_values_that_are_not_finite_stay_in_their_rows() -> None:
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16)
    x[3, 5], x[300, 7] = math.nan, math.inf
    ours = ops.linear(x, weight, activation="gelu")
    theirs = F.gelu(F.linear(x, weight))
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.isinf(), theirs.isinf())
