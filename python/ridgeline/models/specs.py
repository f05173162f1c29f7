"""Architectures as data: what each is built of, and what its checkpoints call each parameter.

How to add one: docs/adding-a-model.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.models.common_weights import LAYER, LLAMA_WEIGHTS, QK_NORMS, QWEN_DEFAULTS
from ridgeline.models.expert_specs import GPT_OSS, MIXTRAL, QWEN3_MOE
from ridgeline.models.spec import SameAs, Spec, all_sliding, every_nth_full, upper_sliding

_SANDWICH_NORMS = {
    "layers.{i}.post_attention_norm": (LAYER + "post_attention_layernorm",),
    "layers.{i}.mlp_norm": (LAYER + "pre_feedforward_layernorm",),
    "layers.{i}.post_mlp_norm": (LAYER + "post_feedforward_layernorm",),
}

LLAMA = Spec(
    model_type="llama",
    weights=LLAMA_WEIGHTS,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
)

MISTRAL = Spec(
    model_type="mistral",
    weights=LLAMA_WEIGHTS,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    windows=all_sliding,
)

QWEN2 = Spec(
    model_type="qwen2",
    weights=LLAMA_WEIGHTS,
    defaults=QWEN_DEFAULTS,
    windows=upper_sliding,
    qkv_bias=True,
)

QWEN3 = Spec(
    model_type="qwen3",
    weights=LLAMA_WEIGHTS | QK_NORMS,
    defaults=QWEN_DEFAULTS | {"head_dim": 128},
    windows=upper_sliding,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
)

_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "vocab_size": 256000,
}

GEMMA2 = Spec(
    model_type="gemma2",
    weights=LLAMA_WEIGHTS | _SANDWICH_NORMS,
    names={"hidden_act": "hidden_activation"},
    defaults=_GEMMA_DEFAULTS
    | {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 8192,
        "sliding_window_pattern": 2,
    },
    unused=("hidden_act", "sliding_window_size"),
    norm_offset=1.0,
    windows=every_nth_full,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    scaled_embedding=True,
)

GEMMA3 = Spec(
    model_type="gemma3_text",
    weights=LLAMA_WEIGHTS | _SANDWICH_NORMS | QK_NORMS,
    names={"hidden_act": "hidden_activation"},
    defaults=_GEMMA_DEFAULTS
    | {
        "final_logit_softcapping": None,
        "max_position_embeddings": 131072,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
    },
    unused=("_sliding_window_pattern",),
    norm_offset=1.0,
    windows=every_nth_full,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    scaled_embedding=True,
)

GEMMA3_WITH_VISION = replace(
    GEMMA3,
    model_type="gemma3",
    weights={
        module: tuple(f"language_model.{source}" for source in sources)
        for module, sources in GEMMA3.weights.items()
    },
    unused=(
        *GEMMA3.unused,
        "boi_token_index",
        "eoi_token_index",
        "image_token_index",
        "mm_tokens_per_image",
        "vision_config",
    ),
    ignored=("vision_tower.", "multi_modal_projector."),
    text_config="text_config",
)

PHI3 = Spec(
    model_type="phi3",
    weights=LLAMA_WEIGHTS
    | {
        "layers.{i}.qkv": (LAYER + "self_attn.qkv_proj",),
        "layers.{i}.up": (LAYER + "mlp.gate_up_proj",),
    },
    defaults={"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "sliding_window": None},
    required={"full_attn_mod": 1, "interpolate_factor": 1},
    windows=all_sliding,
)

GLM = Spec(
    model_type="glm",
    weights=LLAMA_WEIGHTS | {"layers.{i}.up": (LAYER + "mlp.gate_up_proj",)},
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    },
    qkv_bias="attention_bias",
    interleaved_rope=True,
)

GLM4 = replace(
    GLM,
    model_type="glm4",
    weights={
        **GLM.weights,
        "layers.{i}.post_attention_norm": (LAYER + "post_self_attn_layernorm",),
        "layers.{i}.post_mlp_norm": (LAYER + "post_mlp_layernorm",),
    },
)

ERNIE4_5 = Spec(
    model_type="ernie4_5",
    weights=LLAMA_WEIGHTS,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    qkv_bias="use_bias",
    output_bias="use_bias",
    mlp_bias="use_bias",
    interleaved_rope=True,
)

SEED_OSS = Spec(
    model_type="seed_oss",
    weights=LLAMA_WEIGHTS,
    defaults={"attention_bias": True, "head_dim": 128},
    unused=("residual_dropout",),
    qkv_bias="attention_bias",
    output_bias="attention_out_bias",
    mlp_bias="mlp_bias",
)

_GPT2_LAYER = "transformer.h.{i}."
GPT2 = Spec(
    model_type="gpt2",
    weights={
        "embedding": ("transformer.wte",),
        "positions": ("transformer.wpe",),
        "layers.{i}.attention_norm": (_GPT2_LAYER + "ln_1",),
        "layers.{i}.qkv": (_GPT2_LAYER + "attn.c_attn",),
        "layers.{i}.output": (_GPT2_LAYER + "attn.c_proj",),
        "layers.{i}.mlp_norm": (_GPT2_LAYER + "ln_2",),
        "layers.{i}.up": (_GPT2_LAYER + "mlp.c_fc",),
        "layers.{i}.down": (_GPT2_LAYER + "mlp.c_proj",),
        "norm": ("transformer.ln_f",),
        "head": ("lm_head",),
    },
    names={
        "hidden_act": "activation_function",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "num_key_value_heads": "n_head",
        "norm_eps": "layer_norm_epsilon",
    },
    defaults={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_positions": 1024,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    },
    required={"add_cross_attention": False, "scale_attn_weights": True},
    unused=("reorder_and_upcast_attn",),  # scores are always float32
    ignored=(".attn.bias", ".attn.masked_bias"),
    prefix="transformer.",
    norm="layer",
    inner_multiple=4,
    gated=False,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    transposed=True,
)

_OPT_LAYER = "model.decoder.layers.{i}."
OPT = Spec(
    model_type="opt",
    weights={
        "embedding": ("model.decoder.embed_tokens",),
        "positions": ("model.decoder.embed_positions",),
        "layers.{i}.attention_norm": (_OPT_LAYER + "self_attn_layer_norm",),
        "layers.{i}.qkv": tuple(_OPT_LAYER + f"self_attn.{part}_proj" for part in "qkv"),
        "layers.{i}.output": (_OPT_LAYER + "self_attn.out_proj",),
        "layers.{i}.mlp_norm": (_OPT_LAYER + "final_layer_norm",),
        "layers.{i}.up": (_OPT_LAYER + "fc1",),
        "layers.{i}.down": (_OPT_LAYER + "fc2",),
        "norm": ("model.decoder.final_layer_norm",),
        "head": ("lm_head",),
    },
    names={
        "hidden_act": "activation_function",
        "intermediate_size": "ffn_dim",
        "norm_eps": "layer_norm_eps",
        "num_key_value_heads": "num_attention_heads",
    },
    defaults={
        "activation_function": "relu",
        "enable_bias": True,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    required={
        "_remove_final_layer_norm": False,
        "do_layer_norm_before": True,
        "layer_norm_elementwise_affine": True,
        "layer_norm_eps": 1e-5,  # transformers has no key for it
        "word_embed_proj_dim": SameAs("hidden_size"),
    },
    prefix="model.",
    norm="layer",
    gated=False,
    qkv_bias="enable_bias",
    output_bias="enable_bias",
    mlp_bias="enable_bias",
    position_offset=2,
)

_NEOX_LAYER = "gpt_neox.layers.{i}."
GPT_NEOX = Spec(
    model_type="gpt_neox",
    weights={
        "embedding": ("gpt_neox.embed_in",),
        "layers.{i}.attention_norm": (_NEOX_LAYER + "input_layernorm",),
        "layers.{i}.qkv": (_NEOX_LAYER + "attention.query_key_value",),
        "layers.{i}.output": (_NEOX_LAYER + "attention.dense",),
        "layers.{i}.mlp_norm": (_NEOX_LAYER + "post_attention_layernorm",),
        "layers.{i}.up": (_NEOX_LAYER + "mlp.dense_h_to_4h",),
        "layers.{i}.down": (_NEOX_LAYER + "mlp.dense_4h_to_h",),
        "norm": ("gpt_neox.final_layer_norm",),
        "head": ("embed_out",),
    },
    names={
        "num_key_value_heads": "num_attention_heads",
        "partial_rotary_factor": "rotary_pct",
        "rope_theta": "rotary_emb_base",
        "norm_eps": "layer_norm_eps",
    },
    defaults={
        "attention_bias": True,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
    },
    unused=("partial_rotary_factor", "rope_theta"),
    ignored=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    norm="layer",
    gated=False,
    parallel="use_parallel_residual",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias=True,
    qkv_by_head=True,
)

SPECS = {
    spec.model_type: spec
    for spec in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA2,
        GEMMA3,
        GEMMA3_WITH_VISION,
        MIXTRAL,
        QWEN3_MOE,
        GPT_OSS,
        PHI3,
        GLM,
        GLM4,
        ERNIE4_5,
        SEED_OSS,
        GPT2,
        OPT,
        GPT_NEOX,
    )
}


def spec_of(config: Mapping[str, Any]) -> Spec:
    """The architecture of a configuration; one that is not here is refused with the list."""
    model_type = config.get("model_type")
    if model_type not in SPECS:
        raise ValueError(
            f"model_type must be one of the supported architectures ({', '.join(SPECS)}), "
            f"got {model_type!r}"
        )
    return SPECS[model_type]
