"""Ridgeline in PyTorch's register of flash-attention implementations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ridgeline
from ridgeline.integrations import sdpa

register = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"),
    reason="this PyTorch has no register of implementations",
)


@register
def test_it_is_registered_and_not_activated():
    sdpa.enable()
    assert "ridgeline" in torch.nn.attention.list_flash_attention_impls()
    assert torch.nn.attention.current_flash_attention_impl() != "ridgeline"


@register
@pytest.mark.skipif(ridgeline.info().cuda_loaded, reason="the CUDA ops are there")
def test_without_the_cuda_ops_it_says_why():
    sdpa.enable()
    with pytest.raises(RuntimeError, match="flash attention is CUDA's alone"):
        torch.nn.attention.activate_flash_attention_impl("ridgeline")


@register
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_outputs_and_gradients_are_near_float32(causal: bool):
    sdpa.enable()
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(2, 4, 130, 64, generator=generator) for _ in range(4))

    def run(dtype: torch.dtype, backend: SDPBackend) -> list[Tensor]:
        inputs = [t.to("cuda", dtype).requires_grad_() for t in (q, k, v)]
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(*inputs, is_causal=causal)
        return [out.detach(), *torch.autograd.grad(out, inputs, g.to("cuda", dtype))]

    exact = run(torch.float32, SDPBackend.MATH)
    theirs = run(torch.bfloat16, SDPBackend.FLASH_ATTENTION)
    torch.nn.attention.activate_flash_attention_impl("ridgeline")
    try:
        ours = run(torch.bfloat16, SDPBackend.FLASH_ATTENTION)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    for mine, other, right in zip(ours, theirs, exact):
        assert (mine - right).norm() <= 2 * (other - right).norm()
    after = run(torch.bfloat16, SDPBackend.FLASH_ATTENTION)
    assert all(map(torch.equal, after, theirs)), "restored"
