"""The decoder computes what transformers computes; configurations are read or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tiny_model
from ridgeline import LLM, ops
from ridgeline.kv_cache import KVCache, KVCacheLayout
from ridgeline.models import linear
from ridgeline.models.config import ModelConfig
from ridgeline.models.decoder import Decoder, StepInputs
from ridgeline.models.linear import Linear, make_linear
from ridgeline.models.loader import LoadOptions, load_decoder
from ridgeline.models.norms import RmsNorm
from ridgeline.models.rope import RopeConfig, cos_sin_table, inverse_frequencies
from tiny_model import one_thread  # noqa: F401

CPU = torch.device("cpu")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0}
LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def load(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
) -> Decoder:
    loading = LoadOptions(torch.device(device), dtype, max_model_len=256, **options)
    return load_decoder(ModelConfig.from_path(folder), folder, loading)


def logits_of(
    decoder: Decoder,
    prompt: list[int],
    dtype: torch.dtype,
    rows: list[int] | None = None,
    ends: bool = False,
) -> torch.Tensor:
    """Logits of every position, or of ``rows``, in one step over a cache that was full of NaN.
    ``ends``: the decoder is told that they are the ends of all sequences."""
    block_size, count, device = 16, len(prompt), decoder.embedding.device
    blocks = -(-count // block_size)
    layout = KVCacheLayout.of(decoder.config, block_size, "auto", dtype)
    cache = KVCache.allocate(layout, 1 + blocks, device)
    for tensor in cache.k + cache.v:
        tensor.fill_(float("nan"))

    def ints(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    inputs = StepInputs(
        input_ids=ints(prompt),
        positions=ints(range(count)),
        slots=ints(range(block_size, block_size + count)),
        seq_lens=ints([count]),
        cu_q=ints([0, count]),
        block_tables=ints(range(1, 1 + blocks))[None],
        max_q=count,
        rows=None if rows is None else ints(rows),
        rows_are_ends=ends,
    )
    return decoder.logits(decoder.hidden_states(inputs, cache))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="grouped queries"),
        pytest.param({"num_key_value_heads": 4}, id="as many KV heads as query heads"),
        pytest.param({"num_key_value_heads": 1}, id="one KV head"),
        pytest.param({"head_dim": 32}, id="heads wider than the model"),
        pytest.param({"tie_word_embeddings": True}, id="tied embeddings"),
        pytest.param({"attention_bias": True, "mlp_bias": True}, id="biases"),
        pytest.param({"rope_parameters": LLAMA3_ROPE}, id="llama3 rope"),
        pytest.param({"rope_parameters": LINEAR_ROPE}, id="linear rope"),
        pytest.param({"num_hidden_layers": 1}, id="one layer"),
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, overrides: dict[str, Any]):
    model = tiny_model.save_llama(tmp_path, **overrides)
    prompt = tiny_model.prompt_of(50)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    actual = logits_of(load(tmp_path), prompt, torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_bfloat16_logits_are_as_near_to_float32_as_those_of_transformers(tmp_path: Path):
    model = tiny_model.save_llama(tmp_path, initializer_range=0.1)
    prompt = tiny_model.prompt_of(50)
    with torch.no_grad():
        exact = model(torch.tensor([prompt])).logits[0]
        theirs = model.to(torch.bfloat16)(torch.tensor([prompt])).logits[0].float()
    ours = logits_of(load(tmp_path, torch.bfloat16), prompt, torch.bfloat16).float()
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


class Counting:
    """A product that notes how many rows it is given."""

    def __init__(self, product: Linear) -> None:
        self._product, self.rows = product, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._product, name)

    def __call__(self, x: torch.Tensor, *args: Any, **fused: Any) -> torch.Tensor:
        self.rows.append(x.shape[0])
        return self._product(x, *args, **fused)


@pytest.mark.parametrize(
    ("rows", "multiplied"),
    [
        pytest.param([49], [50, 1], id="the last token of a prompt"),
        pytest.param([7, 49, 7], [50, 3], id="one of several, and one twice"),
        pytest.param([], [50], id="a chunk of a prompt"),
        pytest.param([*range(50), 49], [50, 50], id="more than tokens"),
    ],
)
def test_behind_the_last_attention_only_wanted_tokens_are_computed(
    tmp_path: Path, rows: list[int], multiplied: list[int]
):
    tiny_model.save_llama(tmp_path, num_hidden_layers=2)
    decoder, prompt = load(tmp_path), tiny_model.prompt_of(50)
    expected = logits_of(decoder, prompt, torch.float32)
    layers = decoder.layers
    downs = [Counting(layer.down) for layer in layers if layer.down is not None]
    counted = tuple(replace(layer, down=down) for layer, down in zip(layers, downs, strict=True))
    actual = logits_of(replace(decoder, layers=counted), prompt, torch.float32, rows)
    torch.testing.assert_close(actual, expected[rows])
    assert [count for down in downs for count in down.rows] == multiplied


@pytest.mark.parametrize(
    ("rows", "ends", "invariant", "queries"),
    [
        pytest.param([49], True, False, [1], id="the end of a sequence"),
        pytest.param([49], True, True, [], id="whose bits may not be another kernel's"),
        pytest.param([7, 49], False, False, [], id="tokens ahead of the end"),
        pytest.param([], False, True, [], id="a chunk of a prompt"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "opt"])
def test_only_wanted_tokens_query_the_last_layer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    rows: list[int],
    ends: bool,
    invariant: bool,
    queries: list[int],
):
    """Beside the rotation or without it: queries that ``rope_paged_attention`` takes are those of
    all tokens, and the last layer of a chunk has none."""
    tiny_model.save_model(tmp_path, family)
    decoder, prompt = load(tmp_path), tiny_model.prompt_of(50)
    expected = logits_of(decoder, prompt, torch.float32)
    decoder = replace(decoder, batch_invariant=invariant)
    seen: list[int] = []
    for name in ("paged_attention", "rope_paged_attention"):
        plain = getattr(ops, name)

        def noting(q: torch.Tensor, *args: Any, plain: Any = plain, **options: Any) -> Any:
            seen.append(q.shape[0])
            return plain(q, *args, **options)

        monkeypatch.setattr(ops, name, noting)
    actual = logits_of(decoder, prompt, torch.float32, rows, ends)
    torch.testing.assert_close(actual, expected[rows])
    layers = len(decoder.layers)
    whole = layers - 1 if queries or not rows else layers
    assert seen == [50] * whole + queries


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("family", "quantization", "added"),
    [
        pytest.param("llama", "fp8", [50, 50], id="but those of the last layer's one token"),
        pytest.param("llama", "int8", [], id="not other products"),
        pytest.param("llama", "w4a8", [], id="not those of four-bit weights"),
        pytest.param("gemma2", "fp8", [], id="not ahead of a norm"),
        pytest.param("gpt_neox", "fp8", [], id="not attention and MLP beside each other"),
    ],
)
def test_many_fp8_products_are_added_to_the_residual_as_they_are_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    family: str,
    quantization: str,
    added: list[int],
):
    tiny_model.save_model(tmp_path, family, intermediate_size=128)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    decoder, prompt = load(tmp_path, dtype, device, quantization=quantization), [*range(1, 51)]
    expected = logits_of(decoder, prompt, dtype, [49])
    seen: list[int] = []
    add = ops.fp8_linear_add

    def noting(x: torch.Tensor, *args: Any, **options: Any) -> None:
        seen.append(x.shape[0])
        add(x, *args, **options)

    monkeypatch.setattr(ops, "fp8_linear_add", noting)
    monkeypatch.setattr(linear, "_ADDED", 50 * 64)
    assert torch.equal(logits_of(decoder, prompt, dtype, [49]), expected)
    assert seen == added


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_products_are_added_where_bits_may_depend_on_the_number_of_rows(batch_invariant: bool):
    product = linear.make_linear(
        torch.ones(64, 64), None, quantization="fp8", batch_invariant=batch_invariant
    )
    assert isinstance(product, linear.Fp8Linear)
    assert product.adds(1 << 20) is not batch_invariant


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_many_gated_tokens_reach_the_next_product_as_codes(
    monkeypatch: pytest.MonkeyPatch, device: str
):
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    def product(*shape: int, bias: bool = False) -> Any:
        given = normal(*shape), normal(shape[0]) if bias else None
        return make_linear(*given, quantization="fp8", batch_invariant=False)

    up, down, residual = product(1024, 64), product(64, 512), normal(20, 64)
    x = RmsNorm(normal(64), 1e-5).quantized(normal(20, 64))
    assert up.codes_for(down, x, "silu_mul") is None
    monkeypatch.setattr(linear, "_GATED_ROWS", 20)
    codes = up.codes_for(down, x, "silu_mul")
    assert codes.values.shape == (20, 512) and codes.scale.shape == (20, 2)
    total = residual.clone()
    down.add(codes, total)
    expected = down(up(x, "silu_mul")).float()
    error = (total.float() - residual.float() - expected).norm() / expected.norm()
    assert 0 < error < 0.04  # each of two roundings to e4m3: 0.026
    assert up.codes_for(down, x, "gelu_mul") is None
    assert up.codes_for(product(64, 512, bias=True), x, "silu_mul") is None
    assert product(512, 64).codes_for(product(64, 256), x, "silu_mul") is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_logits_through_codes_are_those_of_products_that_quantise_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
):
    tiny_model.save_llama(tmp_path, intermediate_size=512, initializer_range=0.1)
    decoder, prompt = load(tmp_path, torch.bfloat16, device, quantization="fp8"), [*range(1, 41)]
    apart = logits_of(decoder, prompt, torch.bfloat16).float()
    made = []
    codes_for = linear.Fp8Linear.codes_for

    def noting(self: linear.Fp8Linear, *given: Any) -> Any:
        made.append(codes_for(self, *given))
        return made[-1]

    monkeypatch.setattr(linear, "_ADDED", 0)
    monkeypatch.setattr(linear, "_GATED_ROWS", len(prompt))
    monkeypatch.setattr(linear.Fp8Linear, "codes_for", noting)
    through = logits_of(decoder, prompt, torch.bfloat16).float()
    assert len(made) == len(decoder.layers)
    if device == "cpu" or torch.cuda.get_device_capability() == (9, 0):
        assert all(codes is not None for codes in made)
        assert not torch.equal(through, apart)
    assert (through - apart).norm() / apart.norm() < 0.1


@pytest.mark.parametrize("quantization", ["fp8", "w4a8"])
def test_products_meet_the_same_codes_whoever_makes_them(quantization: str):
    """Few tokens are normed in the product's call, many in the pass that adds to the residual."""
    generator = torch.Generator().manual_seed(7)
    x, residual, weight = (torch.randn(n, 256, generator=generator) for n in (20, 20, 48))
    product = make_linear(weight, None, quantization=quantization, batch_invariant=False)
    norm = RmsNorm(torch.rand(256, generator=generator), 1e-5)
    total = residual.clone()
    codes = norm.quantized(x, total)
    assert torch.equal(total, x + residual)
    assert torch.equal(product(codes), product(total, norm=norm))
    assert torch.equal(product(norm.quantized(total)), product(total, norm=norm))


@pytest.mark.parametrize("parameters", [LLAMA3_ROPE, LINEAR_ROPE], ids=["llama3", "linear"])
def test_scaled_frequencies_are_those_of_transformers(tmp_path: Path, parameters: dict[str, Any]):
    model = tiny_model.save_llama(tmp_path, rope_parameters=parameters, head_dim=128)
    expected, _ = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](model.config, CPU)
    config = ModelConfig.from_path(tmp_path)
    torch.testing.assert_close(inverse_frequencies(config.layers[0].rope, 512), expected)


def test_the_rotary_table_has_cosines_then_sines():
    table = cos_sin_table(RopeConfig(dim=4), 3)
    assert table.shape == (3, 4)
    torch.testing.assert_close(table[0], torch.tensor([1.0, 1.0, 0.0, 0.0]))
    torch.testing.assert_close(table[2, 2], torch.tensor(2.0).sin())


def minimal(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    } | changes


def test_defaults_are_those_of_llama():
    config = ModelConfig.from_dict(minimal())
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (4, 16, 1e-6)
    assert config.layers[0].rope.theta == 10000.0
    assert not (config.tied_embeddings or config.qkv_bias or config.mlp_bias)


def test_the_older_keys_of_rope_scaling_mean_the_same():
    old = minimal(rope_theta=500000.0, rope_scaling={**LLAMA3_ROPE, "rope_theta": 500000.0})
    assert ModelConfig.from_dict(old).layers == (
        ModelConfig.from_dict(minimal(rope_parameters=LLAMA3_ROPE)).layers
    )


def test_end_of_sequence_ids_that_are_none_name_their_file(tmp_path: Path):
    tiny_model.save_llama(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "x"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id must be .* 'x'"):
        ModelConfig.from_path(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9999]}')
    (tmp_path / "model.safetensors").unlink()  # said before any weight is looked for
    with pytest.raises(ValueError, match=r"eos_token_id must be below the vocab_size \(384\)"):
        LLM(tmp_path, device="cpu")


def test_end_of_sequence_ids_come_from_the_generation_config_first(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(minimal(eos_token_id=1)))
    assert ModelConfig.from_path(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert ModelConfig.from_path(tmp_path).eos_token_ids == (2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt9"}, r"model_type must be one of .*llama.*, got 'gpt9'"),
        ({"model_type": None}, r"model_type must be one of .*llama.*, got None"),
        ({"hidden_act": "relu"}, "hidden_act must be one of .*silu, got 'relu'"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"num_key_value_heads": 3}, r"\(4\) must be a multiple of num_key_value_heads \(3\)"),
        ({"rope_scaling": {"rope_type": "xpos"}}, "rope_type must be one of default, .*got 'xpos'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "needs low_freq_factor"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "more than low_freq_factor"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": [8.0]}}, "high_freq_factor must be"),
        ({"rope_scaling": YARN_ROPE | {"beta_fast": "32"}}, "beta_fast must be a positive number"),
        ({"rope_scaling": LONG_ROPE | {"short_factor": 1.0}}, "short_factor must be a list"),
        ({"dtype": "int3"}, "dtype must be one of .*, got 'int3'"),
        ({"eos_token_id": -1}, "eos_token_id must be a token id .*, got -1"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(minimal(**changes))
