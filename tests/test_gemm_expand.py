"""Products of many rows by weights of 4 or 8 bits on Hopper."""

from __future__ import annotations

import pytest
import torch

from ridgeline import ops


@pytest.mark.gpu
@pytest.mark.parametrize("zero_point", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_of_any_size(dtype: torch.dtype, zero_point: bool) -> None:
    """Each row of the weight has scales of its own power of two, up to the ends of what bfloat16
    weights are expanded within: 2^26 and 2^-60."""
    N, K, M = 256, 256, 100
    generator = torch.Generator().manual_seed(0)
    first, last = (-60, 26) if dtype == torch.bfloat16 else (-10, 2)
    powers = torch.linspace(first, last, N).round()
    scales = (2.0**powers * (1 + torch.rand(2, N, generator=generator) / 2)).to(dtype)
    q = torch.randint(0, 16, (N, K), generator=generator)
    zeros = torch.randint(0, 16, (2, N), generator=generator) if zero_point else None
    weight = ops.Int4Weight.from_quantized(q, scales, zeros, None).to("cuda")
    x = torch.randn(M, K, generator=generator).to("cuda", dtype)
    wanted = x.double() @ weight.dequantize().double().T
    out = ops.int4_linear(x, weight).double()
    error = (out - wanted).norm(dim=0) / wanted.norm(dim=0)
    assert error.max() < 4e-3
