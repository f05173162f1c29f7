"""Four-bit weights by fp8 inputs: what products of them give, and where inputs stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline import LLM, SamplingParams, ops
from ridgeline.models.linear import Int4Linear, W4A8Linear, linear_of_int4, make_linear
from ridgeline.models.norms import RmsNorm
from tiny_model import one_thread  # noqa: F401

DEMO = Path(__file__).parents[1] / "models" / "demo"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALVES = (torch.float16, torch.bfloat16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_fp8(x: Tensor) -> Tensor:
    """The float64 values that the codes of ``x`` stand for, with a scale a row."""
    codes, scale = ops.quantize_fp8(x, "row")
    return codes.double() * scale.double()


def made(
    weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False
) -> Int4Linear:
    product = make_linear(weight, bias, quantization="w4a8", batch_invariant=batch_invariant)
    assert isinstance(product, Int4Linear)
    return product


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 4, 5, 9, 70])  # Hopper multiplies in 8 bits from 5 on
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_product_is_that_of_the_values_that_codes_stand_for(
    rows: int, batch_invariant: bool, device: str
):
    """Within the dtype's spacing (float32: that of sums of 384), of the norm; an input that is not
    rounded moves it by 0.026."""
    for dtype in (torch.float32, *HALVES) if device == "cpu" else HALVES:
        x, weight, bias = normal(rows, 384), normal(144, 384, seed=1), normal(144, seed=2)
        x, weight, bias = (t.to(device, dtype) for t in (x, weight, bias))
        residual = normal(rows, 72, seed=3).to(device, dtype)
        product = made(weight, bias, batch_invariant=batch_invariant)
        assert type(product) is W4A8Linear and product.codes == product.unit == "fp8"
        actual = product(x, "silu_mul", residual=residual)
        assert actual.dtype == dtype
        sums = in_fp8(x) @ product.weight.dequantize().double().t() + bias.double()
        gate, up = sums.chunk(2, -1)
        gated = torch.nn.functional.silu(gate) * up
        error = actual.double() - (gated + residual.double())
        assert error.norm() < max(torch.finfo(dtype).eps, 1e-6) * gated.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_meets_the_same_rounding_whatever_runs_beside_it(device: str):
    """Normed in the product's call, or ahead of it; alone, or among others that are larger."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = (normal(20, 256) * 10.0 ** normal(20, 1, seed=4)).to(device, dtype)
    product = made(normal(48, 256, seed=1).to(device, dtype), batch_invariant=True)
    norm = RmsNorm(torch.rand(256, generator=torch.Generator().manual_seed(2)).to(x), 1e-5)
    for whole, alone in (
        (product(x), lambda one: product(one)),
        (product(norm.quantized(x)), lambda one: product(one, norm=norm)),
    ):
        assert torch.equal(torch.cat([alone(row[None]) for row in x]), whole)


@pytest.mark.parametrize(
    ("columns", "options", "kind"),
    [
        (384, {}, W4A8Linear),
        (384, {"zero_point": True}, Int4Linear),
        (192, {"group_size": 64}, Int4Linear),
        (96, {"group_size": 32}, Int4Linear),
        (96, {"group_size": -1}, W4A8Linear),
        (512, {"group_size": 256}, W4A8Linear),
    ],
)
def test_inputs_are_rounded_where_they_are_multiplied_so(
    columns: int, options: dict[str, int], kind: type[Int4Linear]
):
    """Hopper expands other weights and their inputs: to round these would cost and gain nothing."""
    weight = ops.pack_int4(normal(32, columns), **options)
    product = linear_of_int4(weight, None, False, fp8_inputs=True)
    assert type(product) is kind
    assert type(linear_of_int4(weight, None, False, fp8_inputs=False)) is Int4Linear
    x = normal(3, columns, seed=1)
    inputs = in_fp8(x) if kind is W4A8Linear else x.double()
    expected = inputs @ weight.dequantize().double().t()
    torch.testing.assert_close(product(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("columns", "group", "kind"),
    [(256, 128, W4A8Linear), (64, 64, W4A8Linear), (192, 64, Int4Linear), (96, 32, Int4Linear)],
)
def test_groups_are_those_of_int4(columns: int, group: int, kind: type[Int4Linear]):
    product = made(normal(32, columns))
    assert product.weight.group == group and type(product) is kind


def test_tokens_of_the_bundled_model_do_not_depend_on_the_batch():
    """Together they are a prompt of many tokens and steps of five; alone steps of one."""
    prompts = ["def fibonacci(n):", "import os", "class Queue:\n", "for i in range(", "x = ["]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options = {"device": "cpu", "num_blocks": 16, "quantization": "w4a8", "batch_invariant": True}
    with LLM(DEMO, **options) as llm:
        layers = llm._parts.runner._model.layers
        products = [p for one in layers for p in (one.qkv, one.output, one.up, one.down)]
        assert {type(product) for product in products} == {W4A8Linear}
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(DEMO, max_num_seqs=1, enable_prefix_caching=False, **options) as llm:
        alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone
