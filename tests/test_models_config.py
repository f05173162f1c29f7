"""Published and older configurations are read as transformers reads them; the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tiny_model
from published_configs import PUBLISHED
from ridgeline.models.config import ModelConfig
from ridgeline.models.loader import LoadOptions, random_decoder
from ridgeline.models.norms import RmsNorm
from ridgeline.models.rope import attention_factor, inverse_frequencies
from ridgeline.models.specs import SPECS
from test_models import load, logits_of
from tiny_model import one_thread  # noqa: F401

SHAPE = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
FACTORS = [1.0 + i / 8 for i in range(8)]


def read(model_type: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({"model_type": model_type} | SHAPE | changes)


def windows(config: ModelConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0} | numbers


# ---- Rotation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "length"),
    [
        pytest.param(rope("linear", factor=3.0), 64, id="linear"),
        pytest.param(rope("dynamic", factor=3.0), 64, id="dynamic, up to its limit"),
        pytest.param(
            rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                 original_max_position_embeddings=32), 64, id="llama3",
        ),
        pytest.param(
            rope("yarn", factor=4.0, original_max_position_embeddings=32), 64, id="yarn",
        ),
        pytest.param(rope("yarn", factor=4.0), 64, id="yarn whose original length is left out"),
        pytest.param(
            rope("yarn", factor=4.0, original_max_position_embeddings=4096, truncate=False,
                 beta_fast=8, beta_slow=1), 64, id="yarn, ramp between fractions",
        ),
        pytest.param(
            rope("yarn", factor=4.0, original_max_position_embeddings=2**20), 64,
            id="yarn, ramp from the first pair on",
        ),
        pytest.param(
            rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=0.7,
                 mscale_all_dim=0.3), 64, id="yarn with mscale",
        ),
        pytest.param(
            rope("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=0.5),
            64, id="yarn with a factor of its own",
        ),
        pytest.param(
            rope("longrope", short_factor=FACTORS, long_factor=FACTORS[::-1],
                 original_max_position_embeddings=32), 33, id="longrope, first length beyond",
        ),
        pytest.param(
            rope("longrope", short_factor=FACTORS, long_factor=FACTORS[::-1],
                 original_max_position_embeddings=32), 32, id="longrope, last length within",
        ),
        pytest.param(
            rope("longrope", short_factor=FACTORS, long_factor=FACTORS[::-1], factor=0.5,
                 original_max_position_embeddings=32), 64, id="longrope that shrinks",
        ),
    ],
)  # fmt: skip
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any], length: int):
    theirs = AutoConfig.for_model("llama", **SHAPE, rope_parameters=dict(parameters))
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, "cpu", length)
    ours = read("llama", rope_parameters=parameters).layers[0].rope
    assert ours is not None
    torch.testing.assert_close(inverse_frequencies(ours, length), frequencies)
    assert attention_factor(ours) == pytest.approx(factor)


def test_yarn_makes_room_beyond_max_position_embeddings():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read("qwen2", rope_scaling=scaling).max_position == 256
    assert read("qwen2").max_position == 64


@pytest.mark.parametrize(
    ("model_type", "older", "newer"),
    [
        pytest.param(
            "gpt_neox",
            {"rotary_pct": 0.5, "rotary_emb_base": 500},
            {"rope_parameters": rope("default", rope_theta=500, partial_rotary_factor=0.5)},
            id="gpt_neox",
        ),
        pytest.param(
            "phi3",
            {
                "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 32,
                "rope_scaling": {"type": "su", "short_factor": FACTORS[:4],
                                 "long_factor": FACTORS[:4]},
            },
            {
                "rope_parameters": rope(
                    "longrope", partial_rotary_factor=0.5, short_factor=FACTORS[:4],
                    long_factor=FACTORS[:4], original_max_position_embeddings=32,
                ),
            },
            id="phi3",
        ),
        pytest.param(
            "gemma3_text",
            {
                "rope_theta": 5000.0,
                "rope_local_base_freq": 100.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 2,
            },
            {
                "rope_parameters": {
                    "full_attention": rope("linear", factor=8.0, rope_theta=5000.0),
                    "sliding_attention": rope("default", rope_theta=100.0),
                },
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            id="gemma3_text",
        ),
    ],
)  # fmt: skip
def test_older_keys_mean_the_same(model_type: str, older: dict[str, Any], newer: dict[str, Any]):
    assert read(model_type, **older).layers == read(model_type, **newer).layers


def test_gemma3_without_keys_is_that_of_transformers():
    config = read("gemma3_text", num_hidden_layers=6)
    thetas = [layer.rope.theta for layer in config.layers if layer.rope is not None]
    assert thetas == [1e4] * 5 + [1e6]
    assert windows(config) == [4096] * 5 + [None]
    assert {layer.scale for layer in config.layers} == {256**-0.5}


# ---- Windows -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "keys", "expected"),
    [
        pytest.param("mistral", {"num_key_value_heads": 4}, [4096] * 4, id="in all, by default"),
        pytest.param("mistral", {"num_key_value_heads": 4, "sliding_window": None}, [None] * 4,
                     id="null is none"),
        pytest.param("qwen2", {"sliding_window": 8, "max_window_layers": 1}, [None] * 4,
                     id="not used"),
        pytest.param(
            "qwen2",
            {"sliding_window": 8, "max_window_layers": 3, "use_sliding_window": True},
            [None] * 3 + [8], id="from max_window_layers on",
        ),
        pytest.param(
            "qwen3",
            {"sliding_window": 8, "use_sliding_window": True,
             "layer_types": ["sliding_attention"] + ["full_attention"] * 3},
            [8, None, None, None], id="layer_types go first",
        ),
        pytest.param("gemma2", {"sliding_window": 8}, [8, None] * 2, id="every other layer"),
        pytest.param("phi3", {}, [None] * 4, id="none by default"),
    ],
)  # fmt: skip
def test_windows_of_the_layers(model_type: str, keys: dict[str, Any], expected: list[int | None]):
    assert windows(read(model_type, **keys)) == expected


# ---- Published files ---------------------------------------------------------------------------


def test_every_architecture_has_a_published_file():
    assert {values["model_type"] for values in PUBLISHED.values()} == set(SPECS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name: str):
    values = PUBLISHED[name]
    config = ModelConfig.from_dict(values)
    theirs = AutoConfig.for_model(**values).get_text_config()
    heads = theirs.num_attention_heads
    assert config.hidden_size == theirs.hidden_size
    assert config.num_layers == theirs.num_hidden_layers
    assert config.num_kv_heads == getattr(theirs, "num_key_value_heads", heads)
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert config.max_position == theirs.max_position_embeddings
    assert config.tied_embeddings == theirs.tie_word_embeddings
    ropes = getattr(theirs, "rope_parameters", None)
    for i, layer in enumerate(config.layers):
        if layer.rope is None:
            assert ropes is None
            continue
        given = ropes if "rope_theta" in ropes else ropes[theirs.layer_types[i]]
        assert layer.rope.theta == given["rope_theta"]
        assert layer.rope.kind == given["rope_type"]
        assert layer.rope.dim == int(config.head_dim * given.get("partial_rotary_factor", 1))
    sliding = [kind == "sliding_attention" for kind in getattr(theirs, "layer_types", None) or []]
    if sliding:
        assert [window is not None for window in windows(config)] == sliding


# ---- Refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("llama", {"sliding_window": 8}, "'llama'.*sliding_window=8; understood are .*vocab_size"),
        ("llama", {"one": 1, "two": [2]}, r"one=1, two=\[2\]; understood"),
        ("llama", {"quantization_config": {"bits": 4}}, "quant_method must be one of"),
        ("mistral", {"num_key_value_heads": 4, "layer_types": ["full_attention"]}, "layer_types="),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gpt2", {"num_key_value_heads": 1}, "num_key_value_heads=1"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights must be True, got False"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before must be True, got False"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim must be 64, got 32"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias=True"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types must be .* of 4 layers"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types must be .*'chunked"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 4096, got 1000"),
        ("llama", {"head_dim": 12}, "must be a multiple of 8 up to 256, got 12"),
        ("llama", {"head_dim": 264}, "must be a multiple of 8 up to 256, got 264"),
        ("llama", {"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
        ("llama", {"rms_norm_eps": "x"}, "rms_norm_eps must be a positive number, got 'x'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a positive"),
        ("gemma2", {"sliding_window": None}, "sliding_window must be a positive integer, got None"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation must be one of gelu, .*silu"),
        ("gpt2", {"activation_function": "mish"}, "activation_function must be .*relu, silu, got"),
        ("llama", {"rope_scaling": {"type": "mrope"}}, "rope_type must be one of default, .*'mr"),
        ("llama", {"rope_scaling": rope("yarn", factor=2, beta=1)}, "not understood: beta; under"),
        ("llama", {"rope_scaling": rope("longrope")}, "needs short_factor, long_factor, got"),
        (
            "llama",
            {"rope_scaling": rope("longrope", short_factor=[1.0] * 8, long_factor=[1.0])},
            "long_factor must have a number for each of 8 frequencies, got 1",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            "llama",
            {"rope_parameters": rope("linear", factor=2, partial_rotary_factor=0.5)},
            "not understood: partial_rotary_factor",
        ),
        ("llama", {"rope_parameters": [1]}, r"rope_parameters must be a JSON object, got \[1\]"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": rope("default"), "chunked_attention": {}}},
            "must be for full_attention and sliding_attention, got .*chunked",
        ),
        ("mamba", {}, r"supported architectures \(llama, mistral.*\), got 'mamba'"),
    ],
)
def test_what_is_not_understood_is_refused(model_type: str, keys: dict[str, Any], message: str):
    shape = {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 100}
    if model_type == "opt":
        shape = SHAPE | {"ffn_dim": 128}
        del shape["intermediate_size"]
    elif model_type != "gpt2":
        shape = SHAPE
    ModelConfig.from_dict({"model_type": "llama"} | SHAPE | {"later": None, "off": False})
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({"model_type": model_type} | shape | keys)


# ---- Weights -----------------------------------------------------------------------------------


def test_random_norms_multiply_by_one():
    """Whatever is added to their weights."""
    options = LoadOptions(torch.device("cpu"), torch.float32, max_model_len=16)
    for model_type in ("llama", "gemma2"):
        norm = random_decoder(read(model_type, head_dim=16), options, seed=0).norm
        assert isinstance(norm, RmsNorm)
        assert set((norm.weight + norm.offset).tolist()) == {1.0}


@pytest.mark.parametrize(("model_type", "prefix"), [("gpt2", "transformer."), ("opt", "model.")])
def test_a_checkpoint_may_leave_out_the_prefix_of_all_names(
    tmp_path: Path, model_type: str, prefix: str
):
    """As the one of gpt2 does, which also holds the causal mask as a buffer of each layer."""
    model = tiny_model.save_model(tmp_path, model_type)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix(prefix): value for name, value in load_file(path).items()}
    if model_type == "gpt2":
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, path)
    prompt = tiny_model.prompt_of(9)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    actual = logits_of(load(tmp_path), prompt, torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_shapes_are_checked_as_they_are_stored(tmp_path: Path):
    """Transposed, stacked and with rows before the first position."""
    tiny_model.save_model(tmp_path / "gpt2", "gpt2")
    tiny_model.edit_json(tmp_path / "gpt2" / "config.json", n_inner=32)
    with pytest.raises(ValueError, match=r"h\.0\.mlp\.c_fc\.weight: expected \[64, 32\], got"):
        load(tmp_path / "gpt2")
    tiny_model.save_model(tmp_path / "phi3", "phi3")
    tiny_model.edit_json(tmp_path / "phi3" / "config.json", num_key_value_heads=4)
    with pytest.raises(ValueError, match=r"qkv_proj\.weight: expected \[192, 64\], got \[128"):
        load(tmp_path / "phi3")
    tiny_model.save_model(tmp_path / "opt", "opt")
    tiny_model.edit_json(tmp_path / "opt" / "config.json", max_position_embeddings=8)
    with pytest.raises(ValueError, match=r"embed_positions\.weight: expected \[10, 64\], got"):
        load(tmp_path / "opt")
