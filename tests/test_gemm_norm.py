"""rmsnorm, bias and residual in products of few rows on Hopper: one kernel, rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ridgeline
from ridgeline import ops

pytestmark = pytest.mark.gpu

EPS = 1e-5
FORMATS = ["dense", "fp8", "fp8 blocks", "int4", "int4 zeros", "int4 groups of 32"]


def normal(*shape: int, seed: int = 3) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def packed(format: str, N: int, K: int) -> tuple[str, tuple[Any, ...], Tensor]:
    """The op, the arguments that are its weight, and the weight in float64."""
    weight = normal(N, K, seed=4) * K**-0.5
    if format == "dense":
        return "linear", (weight,), weight.double()
    if format.startswith("int4"):
        group = 32 if format.endswith("32") else 128
        int4 = ops.pack_int4(weight, group, zero_point=format == "int4 zeros")
        zeros = 8 if int4.zeros is None else int4.zeros.double().repeat_interleave(group, 0).T
        by = int4.scales.double().repeat_interleave(group, 0).T
        return "int4_linear", (int4,), (int4.quantized().double() - zeros) * by
    codes = (weight * 8).to(torch.float8_e4m3fn)
    blocks = (-(-N // 128), -(-K // 128))
    shape = blocks if format == "fp8 blocks" else (N,)
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(5)).cuda() + 0.5
    by = scale[:, None]
    if format == "fp8 blocks":
        by = scale.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    return "fp8_linear", (codes, scale), codes.double() * by


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("M", "N", "K", "gated"),
    [
        (9, 1024, 4096, False),  # K cut over a cluster; rows that are missing
        (16, 4096, 14336, False),
        (16, 28672, 1168, True),  # a tail of K, which is not cut
        (16, 13824, 5120, False),  # fp8: rings of five stages
        (13, 3600, 8208, False),  # tiles that are not whole, and K cut
        (2, 4096, 14336, False),  # two strips of 16 weight rows a block
        (1, 28672, 4096, False),  # many of them
        (3, 28672, 4096, True),
        (8, 28656, 4096, False),
        (8, 28672, 4096, True),
    ],
)
def test_norms_of_few_rows(format: str, M: int, N: int, K: int, gated: bool) -> None:
    if format.startswith("int4"):
        K = -(-K // 128) * 128
    op, weight, exact_weight = packed(format, N, K)
    x, norm = normal(M, K) * torch.logspace(-3, 3, M, device="cuda")[:, None], normal(K, seed=6)
    x = x.bfloat16()
    columns = N // 2 if gated else N
    bias, residual = normal(N, seed=7), normal(M, columns, seed=8)
    options: dict[str, Any] = {"bias": bias, "residual": residual, "norm_weight": norm}
    options |= {"norm_eps": EPS, "activation": "silu_mul" if gated else None}

    def finish(product: Tensor) -> Tensor:
        product = product + bias
        if gated:
            gate, up = product.chunk(2, -1)
            product = F.silu(gate) * up
        return product + residual

    rows = F.rms_norm(x.double(), (K,), norm.double(), EPS)
    exact = finish(rows @ exact_weight.T)
    rounded = finish(rows.bfloat16().double() @ exact_weight.bfloat16().double().T).bfloat16()
    for weights_ready in (False, True):
        ours = getattr(ops, op)(x, *weight, **options, weights_ready=weights_ready)
        error = (ours.double() - exact).norm(dim=1)
        assert (error <= 2 * (rounded.double() - exact).norm(dim=1)).all()
        told = ridgeline.explain(op, x, *weight, **options, weights_ready=weights_ready)
        assert len(told.kernels) == (1 if "folds_norm=1" in told.choices[0] else 2)


@pytest.mark.parametrize("weights_ready", [False, True])
def test_a_norm_of_its_own_kernel_leaves_the_choice_to_the_product(weights_ready: bool) -> None:
    """None folds a norm whose weight is float32: the product behind it is a plain one, which four
    rows give to another kernel than one with a norm."""
    x, weight, norm = normal(4, 4096), normal(6144, 4096, seed=4), normal(4096, seed=6)

    def choices(norm: Tensor | None) -> Any:
        options: dict[str, Any] = {"norm_weight": norm, "weights_ready": weights_ready}
        return ridgeline.explain("linear", x, weight, **options).choices

    assert choices(norm.float()) == choices(None) != choices(norm)


@pytest.mark.parametrize("N", [4096, 28672])  # K cut, or not
def test_a_row_that_is_not_finite_leaves_the_others_alone(N: int) -> None:
    x, weight, norm = normal(16, 4096), normal(N, 4096, seed=4), normal(4096, seed=6)
    wanted = ops.linear(x, weight, norm_weight=norm)
    x[3, 77], x[12, 4095] = float("nan"), float("inf")
    out = ops.linear(x, weight, norm_weight=norm)
    others = [m for m in range(16) if m not in (3, 12)]
    assert torch.equal(out[others], wanted[others])
    assert out[[3, 12]].isnan().all()
