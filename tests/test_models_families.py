"""Every architecture computes what transformers computes, and generates the same tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import tiny_model
from ridgeline import LLM, SamplingParams
from ridgeline.models.specs import SPECS
from test_models import load, logits_of
from tiny_model import one_thread  # noqa: F401

LONG = tiny_model.prompt_of(53)  # three blocks of 16 and a part, longer than all windows here
SHORT = tiny_model.prompt_of(5)  # shorter than all windows
WINDOW = 11  # within a block and across its edge
NEW_TOKENS = 5


def case(reason: str, model_type: str, **overrides: Any) -> Any:
    return pytest.param((model_type, overrides), id=f"{model_type}: {reason}")


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0} | numbers


SHORT_FACTORS = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
LONG_FACTORS = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TEXT = {
    "vocab_size": tiny_model.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
CASES = [
    case(
        "yarn, past the original length", "llama",
        rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    case("dynamic scaling, which acts beyond the limit", "llama",
         rope_parameters=rope("dynamic", factor=4.0)),
    case("a window in every layer", "mistral", sliding_window=WINDOW),
    case("no window", "mistral", sliding_window=None),
    case("biases of the projections alone", "qwen2"),
    case(
        "upper layers slide", "qwen2",
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1,
    ),
    case("head norms", "qwen3", head_dim=32),
    case("head norms and biases", "qwen3", head_dim=32, attention_bias=True),
    case(
        "caps, alternating windows, norms on both sides, scaled embedding", "gemma2",
        head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=48,
        attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
    ),
    case("no caps", "gemma2", head_dim=32, attn_logit_softcapping=None,
         final_logit_softcapping=None),
    case(
        "a rotation for each kind of layer", "gemma3_text",
        head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": rope("linear", factor=8.0, rope_theta=1e6),
            "sliding_attention": rope("default"),
        },
    ),
    case("a full layer after two that slide", "gemma3_text",
         head_dim=32, sliding_window=WINDOW, num_hidden_layers=3, sliding_window_pattern=3),
    case("the text model of one that sees", "gemma3",
         text_config=TEXT, vision_config=VISION, image_token_index=0, mm_tokens_per_image=4),
    case("experts, normalised weights", "mixtral", num_local_experts=6, head_dim=32),
    case("experts, all of them, a window", "mixtral", num_local_experts=2, sliding_window=WINDOW),
    case("narrow experts, head norms, weights as they are", "qwen3_moe", head_dim=32,
         num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48),
    case("narrow experts, normalised weights", "qwen3_moe", head_dim=32, num_experts=5,
         num_experts_per_tok=2, moe_intermediate_size=48, norm_topk_prob=True),
    case("sinks, biases everywhere, clamped experts, alternating windows", "gpt_oss", head_dim=32,
         num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
         rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=32,
                              beta_fast=32.0, beta_slow=1.0, truncate=False)),
    case("stacked projections, a window", "phi3", sliding_window=WINDOW),
    case(
        "longrope past the original length, part of a head rotated", "phi3",
        original_max_position_embeddings=4,  # SHORT is longer too
        rope_parameters=rope("longrope", partial_rotary_factor=0.75,
                             short_factor=SHORT_FACTORS, long_factor=LONG_FACTORS),
    ),
    case(
        "longrope within the original length", "phi3",
        original_max_position_embeddings=512,
        rope_parameters=rope("longrope", partial_rotary_factor=0.75, factor=4.0,
                             short_factor=SHORT_FACTORS, long_factor=LONG_FACTORS),
    ),
    case("half a head rotated, neighbours as pairs", "glm", head_dim=32),
    case("norms on both sides", "glm4", head_dim=32),
    case("neighbours as pairs, tied", "ernie4_5"),
    case("biases everywhere", "ernie4_5", use_bias=True, tie_word_embeddings=False),
    case("biases of q, k and v alone", "seed_oss", head_dim=32),
    case("a bias of the output", "seed_oss", head_dim=32, attention_out_bias=True, mlp_bias=True),
    case("learned positions, transposed weights", "gpt2"),
    case("attention scaled by depth, an odd MLP", "gpt2",
         scale_attn_by_inverse_layer_idx=True, n_inner=96),
    case("positions from the third row on, relu", "opt", ffn_dim=160, init_std=0.3),
    case("no biases, gelu", "opt", ffn_dim=160, init_std=0.3, enable_bias=False,
         activation_function="gelu"),
    case("parallel, a quarter of a head rotated, projection by head", "gpt_neox"),
    case("one after the other, whole heads, no attention bias", "gpt_neox",
         use_parallel_residual=False, attention_bias=False,
         rope_parameters=rope("default", partial_rotary_factor=1.0)),
]  # fmt: skip


@dataclass(frozen=True)
class Model:
    folder: Path
    oracle: PreTrainedModel

    def logits(self, prompt: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        oracle = self.oracle
        if dtype != torch.float32:  # loaded so, the rotation stays in float32
            oracle = (
                type(oracle)
                .from_pretrained(self.folder, dtype=dtype, attn_implementation="eager")
                .eval()
            )
        with torch.no_grad():
            return oracle(torch.tensor([prompt]), use_cache=False).logits[0]

    def greedy(self, prompt: list[int]) -> list[int]:
        """By whole passes: the cache of transformers is not what is tested."""
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def generate(self, params: SamplingParams, **options: Any) -> list[list[int]]:
        # Chunks of 16 tokens: windows reach over steps as well as over blocks.
        sizes = {"block_size": 16, "num_blocks": 9, "max_num_batched_tokens": 16}
        with LLM(self.folder, max_num_seqs=2, **sizes, **options) as llm:
            outputs = llm.generate([LONG, SHORT], params)
        return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    model_type, overrides = request.param
    folder = tmp_path_factory.mktemp(model_type)
    return Model(folder, tiny_model.save_model(folder, model_type, **overrides))


GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_logits_are_those_of_transformers(model: Model):
    actual = logits_of(load(model.folder), LONG, torch.float32)
    torch.testing.assert_close(actual, model.logits(LONG), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(model: Model, device: str):
    exact, dtype = model.logits(LONG), torch.bfloat16
    theirs = model.logits(LONG, dtype).float()
    ours = logits_of(load(model.folder, dtype, device), LONG, dtype).float().cpu()
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


def test_greedy_tokens_are_those_of_transformers(model: Model):
    assert model.generate(GREEDY, device="cpu") == [model.greedy(LONG), model.greedy(SHORT)]


@pytest.mark.gpu
def test_graphs_are_eager_steps_to_the_bit(model: Model):
    options = {"device": "cuda", "batch_invariant": True}
    graphs = model.generate(GREEDY, **options)
    assert graphs == model.generate(GREEDY, **options, enforce_eager=True)


def test_random_weights_need_the_configuration_only(model: Model):
    config = json.loads((model.folder / "config.json").read_text())
    with LLM.from_config(config, device="cpu", num_blocks=4, max_num_seqs=2) as llm:
        (output,) = llm.generate(SHORT, SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


def test_the_scale_of_embeddings_is_rounded_as_transformers_rounds_it(tmp_path: Path):
    tiny_model.save_model(tmp_path, "gemma2", hidden_size=48)
    assert load(tmp_path, torch.float32).embedding_scale == pytest.approx(48**0.5)
    assert load(tmp_path, torch.bfloat16).embedding_scale == 6.9375


def test_every_architecture_has_a_case():
    assert {param.values[0][0] for param in CASES} == set(SPECS)
