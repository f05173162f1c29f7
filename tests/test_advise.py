"""Predictions from roofs: where each scheme stops paying can be worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ridgeline
from ridgeline.roofline.machine import Roofs

READ, BF16, FP8 = 4e12, 800e12, 1600e12
RATES = {"fp32": 60e12, "bf16": BF16, "fp8": FP8}
ROOFS = Roofs("a card", copy=READ / 2, read=READ, flops=RATES, launch_us=0.0)
N = K = 1 << 14


def test_times_are_the_longer_of_bytes_and_operations():
    advice = ridgeline.advise_quantization([(N, K)] * 2, rows=(1, 8192), roofs=ROOFS)
    one, many = advice.microseconds["16 bits"]
    assert one == pytest.approx(2 * (2 * N * K + 2 * (N + K)) / READ * 1e6)
    assert many == pytest.approx(2 * 2 * 8192 * N * K / BF16 * 1e6)
    assert advice.microseconds["fp8"][1] == pytest.approx(many / 2)
    assert advice.microseconds["int8"] == advice.microseconds["fp8"]
    assert advice.microseconds["int4"][1] == pytest.approx(many)
    assert 0.25 < advice.microseconds["int4"][0] / one < 0.27
    assert advice.microseconds["w4a8"][1] == pytest.approx(many / 2)
    spared = 2 * (K - 4) / READ * 1e6  # a byte of each input, and one scale
    assert advice.microseconds["w4a8"][0] == pytest.approx(advice.microseconds["int4"][0] - spared)
    assert advice.best(1) == "int4" and advice.best(8192) == "fp8"  # the others are no faster
    few = ridgeline.advise_quantization([(N, K)], rows=128, roofs=ROOFS)
    assert few.best(128) == "w4a8"


def test_scales_of_int4_are_two_bytes_for_128_columns_of_a_row():
    rows, columns = 1024, 320  # the last group is short
    advice = ridgeline.advise_quantization([(rows, columns)], rows=1, roofs=ROOFS)
    moved = rows * columns / 2 + 2 * rows * 3 + 2 * (rows + columns)
    assert advice.microseconds["int4"] == (pytest.approx(moved / READ * 1e6),)


def test_weights_alone_stop_paying_where_products_are_compute_bound():
    """2 M N K / 800 T beyond (2 N K + 2 M (N + K)) / 4 T: from about 205 rows on."""
    advice = ridgeline.advise_quantization([(N, K)], roofs=ROOFS)
    rows = next(
        m for m in range(1, 1000) if 2 * m * N * K / BF16 >= (2 * N * K + 2 * m * (N + K)) / READ
    )
    assert advice.pays_below["int4"] == pytest.approx(rows, abs=1)
    assert advice.pays_below["fp8"] is advice.pays_below["w4a8"] is None
    ends = ["-", "-", "-", str(advice.pays_below["int4"]), "-"]
    assert str(advice).splitlines()[-1].split() == ["pays", "below", *ends]


def test_experts_are_read_if_a_token_chooses_them():
    """Of eight, two a token: one token touches two, three 8 (1 - 0.75^3), many all."""
    rows = (1, 3, 8192)
    advice = ridgeline.advise_quantization([(N, K, 8, 2)], rows=rows, roofs=ROOFS)
    times = dict(zip(rows, advice.microseconds["16 bits"], strict=True))
    for count, touched in ((1, 2), (3, 8 * (1 - 0.75**3))):
        moved = touched * 2 * N * K + 2 * 2 * count * (N + K)
        assert times[count] == pytest.approx(moved / READ * 1e6)
    assert times[8192] == pytest.approx(2 * 2 * 8192 * N * K / BF16 * 1e6)
    # Each expert has a quarter of the tokens.
    one = ridgeline.advise_quantization([(N, K)], roofs=ROOFS).pays_below["int4"]
    assert advice.pays_below["int4"] == pytest.approx(4 * one, rel=0.02)
    assert advice.microseconds["fp8"][2] == pytest.approx(times[8192] / 2)
    # There are no products of experts by int8, nor of int4 by fp8.
    assert advice.microseconds["int8"] == advice.microseconds["16 bits"]
    assert advice.microseconds["w4a8"] == advice.microseconds["int4"]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_experts_of_transformers_count(family: str):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1,
             "intermediate_size": 32, "num_experts": 4, "num_local_experts": 4,
             "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
             "vocab_size": 128, "first_k_dense_replace": 0}  # fmt: skip
    for name in sizes.keys() & set(dir(config)):
        setattr(config, name, sizes[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    linears = [(m.out_features, m.in_features) for m in model.modules() if type(m) is nn.Linear]
    shapes = [*linears, (64, 64, 4, 2), (64, 32, 4, 2)]
    advice = ridgeline.advise_quantization(model, roofs=ROOFS)
    meant = ridgeline.advise_quantization(shapes, roofs=ROOFS)
    for name, times in meant.microseconds.items():
        assert advice.microseconds[name] == pytest.approx(times)
    experts = model.model.layers[0].mlp.experts
    with pytest.raises(ValueError, match=r"expected one top_k beside the experts '', got \[\]"):
        ridgeline.advise_quantization(experts, roofs=ROOFS)


def test_a_machine_without_8_bit_units():
    roofs = Roofs("a processor", copy=1e10, read=1e10, flops={"fp32": 1e11}, launch_us=1.0)
    advice = ridgeline.advise_quantization([(N, K)], rows=[1, 64], roofs=roofs)
    assert list(advice.microseconds) == ["16 bits", "int4"]
    assert advice.pays_below["int4"] < 20
    rates = {"bf16": 1e14, "fp32": 1e13, "int8": 2e14}
    roofs = Roofs("int8 alone", copy=1e12, read=1e12, flops=rates, launch_us=1.0)
    advice = ridgeline.advise_quantization([(N, K)], rows=[1], roofs=roofs)
    assert list(advice.microseconds) == ["16 bits", "int8", "int4"]


def test_modules_and_wrong_arguments():
    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 32))
    shapes = ridgeline.advise_quantization([(128, 64), (32, 128)], roofs=ROOFS)
    assert ridgeline.advise_quantization(model, roofs=ROOFS) == shapes
    model[2] = ridgeline.nn.Linear.from_torch(model[2])
    assert ridgeline.advise_quantization(model, roofs=ROOFS) == shapes
    one = ridgeline.advise_quantization(model, 8, roofs=ROOFS)
    assert one == ridgeline.advise_quantization(model, [8], roofs=ROOFS) and one.rows == (8,)
    for wrong in ([4, 5], [(4,)], [(4, 4, 4)], [(4.5, 4)], [(True, 4)], "x", 3, None):
        with pytest.raises(TypeError, match=r"model_or_shapes: expected .*\(N, K\) of each weight"):
            ridgeline.advise_quantization(wrong, roofs=ROOFS)
    for rows in ([1.5], True, None, "8"):
        with pytest.raises(TypeError, match=r"rows: expected integers, got (\[1.5\]|\w|')"):
            ridgeline.advise_quantization(model, rows=rows, roofs=ROOFS)
    with pytest.raises(ValueError, match="at least one linear layer, got none"):
        ridgeline.advise_quantization(nn.LayerNorm(4), roofs=ROOFS)
    with pytest.raises(ValueError, match=r"rows: expected numbers of at least 1, got \[0\]"):
        ridgeline.advise_quantization(model, rows=[0], roofs=ROOFS)
    for small in ((0, 4), (4, 4, 2, 0)):
        with pytest.raises(ValueError, match="sizes of at least 1"):
            ridgeline.advise_quantization([small], roofs=ROOFS)
    with pytest.raises(ValueError, match="top <= experts, got .*experts=2, top=3"):
        ridgeline.advise_quantization([(4, 4, 2, 3)], roofs=ROOFS)
