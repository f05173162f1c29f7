"""Every architecture is quantised; moving factors of columns leaves what it computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny_model
from ridgeline import quantize_checkpoint
from ridgeline._quantize.folding import Fold, LayerWeights, folds_of
from ridgeline.models.config import ModelConfig
from ridgeline.models.expert_linear import Fp8ExpertLinear, Int4ExpertLinear
from ridgeline.models.linear import W4A8Linear
from ridgeline.models.loader import LoadOptions, assemble, build_decoder, load_decoder
from ridgeline.models.weights import Checkpoint, parameters
from test_models import load, logits_of
from tiny_model import one_thread  # noqa: F401

PROMPT = tiny_model.prompt_of(20)
FAMILIES = [
    ("llama", {}), ("qwen2", {}), ("qwen3", {"head_dim": 32}), ("gemma2", {"head_dim": 32}),
    ("phi3", {}), ("gpt2", {}), ("opt", {"ffn_dim": 160}), ("gpt_neox", {}),
    ("mixtral", {"num_local_experts": 3}),
    ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    ("gpt_oss", {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 32}),
]  # fmt: skip


@pytest.mark.parametrize(("family", "overrides"), FAMILIES, ids=lambda value: str(value))
def test_folding_keeps_what_a_model_computes(tmp_path: Path, family: str, overrides: dict):
    tiny_model.save_model(tmp_path, family, **overrides)
    config, cpu = ModelConfig.from_path(tmp_path), torch.device("cpu")
    checkpoint, options = Checkpoint(tmp_path, cpu, config), LoadOptions(cpu, torch.float32, 64)
    table = {p.name: p for p in parameters(config)}
    draw, folded = torch.Generator().manual_seed(0), {}
    for i in range(config.num_layers):
        begin = f"layers.{i}."
        own = {n.removeprefix(begin): p for n, p in table.items() if n.startswith(begin)}
        names = frozenset(part.name for p in own.values() for part in p.parts)
        weights = LayerWeights(config, own, checkpoint, names)
        for fold in folds_of(config):
            weights.fold(fold, factors_of(fold, own[f"{fold.reader}.weight"].shape[1], draw))
        folded |= {part.name: weights[part] for p in own.values() for part in p.parts}
        assert len(weights.changed) >= 4
    decoder = build_decoder(
        config,
        options,
        lambda p: assemble(
            p, lambda q: folded[q.name] if q.name in folded else checkpoint.read(q), options,
            plain=True,
        ),
    )  # fmt: skip
    expected = logits_of(load(tmp_path), PROMPT, torch.float32)
    actual = logits_of(decoder, PROMPT, torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def factors_of(fold: Fold, K: int, draw: torch.Generator) -> Tensor:
    shape = fold.repeats or (1, 1, K)
    factors = torch.rand(shape[0], 1, shape[2], generator=draw) + 0.5
    return factors.expand(shape).flatten()


@pytest.mark.parametrize(("family", "overrides"), FAMILIES, ids=lambda value: str(value))
def test_every_family_is_quantised(tmp_path: Path, family: str, overrides: dict):
    """By the method that touches most; what was written is near to what was given."""
    tiny_model.save_model(tmp_path / "in", family, initializer_range=0.1, **overrides)
    tiny_model.save_tokenizer(tmp_path / "in")
    text, out = tiny_model.save_text(tmp_path / "text.txt"), tmp_path / "out"
    quantize_checkpoint(
        tmp_path / "in",
        out,
        method="awq+gptq",
        group_size=32,
        text=text,
        zero_point=True,
        samples=8,
        window=32,
        device="cpu",
    )
    expected = logits_of(load(tmp_path / "in"), PROMPT, torch.float32)
    actual = logits_of(load(out), PROMPT, torch.float32)
    assert (actual - expected).norm() < 0.6 * expected.norm()  # others are 1.4 apart


def test_a_norm_that_feeds_two_products_is_left(tmp_path: Path) -> None:
    """Both would divide it."""
    tiny_model.save_model(tmp_path, "gpt_neox")
    config = ModelConfig.from_path(tmp_path)
    assert [fold.norm for fold in folds_of(config)] == ["attention_norm", None, "mlp_norm"]
    norm = config.spec.weights["layers.{i}.attention_norm"]
    spec = replace(config.spec, weights={**config.spec.weights, "layers.{i}.mlp_norm": norm})
    assert [fold.norm for fold in folds_of(replace(config, spec=spec))] == [None]


def test_experts_have_no_order_of_their_own(tmp_path: Path):
    tiny_model.save_model(tmp_path / "in", "mixtral", num_local_experts=3)
    tiny_model.save_tokenizer(tmp_path / "in")
    text = tiny_model.save_text(tmp_path / "text.txt")
    with pytest.raises(ValueError, match="experts share an order of columns"):
        quantize_checkpoint(
            tmp_path / "in", tmp_path / "out", method="gptq", group_size=32, act_order="group",
            text=text, samples=8, window=32, device="cpu",
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*no product of experts with int8")
def test_experts_without_a_product_stay_as_they_are(tmp_path: Path):
    tiny_model.save_model(tmp_path / "in", "mixtral", num_local_experts=3)
    done = quantize_checkpoint(tmp_path / "in", tmp_path / "out", scheme="int8", device="cpu")
    assert done.matrices == 8  # attention's of two layers
    options = LoadOptions(torch.device("cpu"), torch.float32, 256, quantization="int8")
    while_loading = load_decoder(ModelConfig.from_path(tmp_path / "in"), tmp_path / "in", options)
    expected = logits_of(while_loading, PROMPT, torch.float32)
    assert torch.equal(logits_of(load(tmp_path / "out"), PROMPT, torch.float32), expected)


def test_experts_of_four_bits_keep_their_inputs(tmp_path: Path):
    """Beside attention, whose inputs are rounded to fp8."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_local_experts": 3}
    tiny_model.save_model(tmp_path / "in", "mixtral", **sizes)
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", scheme="w4a8", device="cpu")
    made, while_loading = load(tmp_path / "out"), load(tmp_path / "in", quantization="w4a8")
    for decoder in (made, while_loading):
        layer = decoder.layers[0]
        assert layer.experts is not None and type(layer.experts.up) is Int4ExpertLinear
        assert type(layer.qkv) is type(layer.output) is W4A8Linear
    expected = logits_of(while_loading, PROMPT, torch.float32)
    assert torch.equal(logits_of(made, PROMPT, torch.float32), expected)


def test_experts_of_blocks_stay_in_eight_bits(tmp_path: Path):
    tiny_model.save_model(
        tmp_path / "in", "qwen3_moe", initializer_range=0.1, hidden_size=128, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=128, num_key_value_heads=4,
    )  # fmt: skip
    out = tmp_path / "out"
    blocks = {"scheme": "fp8", "granularity": "block", "device": "cpu"}
    assert quantize_checkpoint(tmp_path / "in", out, **blocks).matrices == 2 * (4 + 3 * 4)
    made, plain = load(out), load(tmp_path / "in")
    experts, dense = made.layers[0].experts, plain.layers[0].experts
    assert isinstance(experts.up, Fp8ExpertLinear) and experts.up.scale.shape == (4, 2, 1)
    assert isinstance(experts.down, Fp8ExpertLinear) and experts.down.scale.shape == (4, 1, 1)
    x, offsets = torch.randn(9, 128), torch.tensor([0, 4, 4, 7, 9], dtype=torch.int32)
    for product, meant in ((experts.up, dense.up), (experts.down, dense.down)):
        expected = meant(x, offsets, None, None)
        actual = product(x, offsets, None, None)
        assert (actual - expected).norm() < 0.04 * expected.norm()
