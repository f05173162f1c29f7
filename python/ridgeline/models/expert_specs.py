"""Mixtures of experts as data: see ``specs.py``."""

from __future__ import annotations

from ridgeline.models.common_weights import LAYER, LLAMA_WEIGHTS, QK_NORMS, QWEN_DEFAULTS
from ridgeline.models.spec import ExpertSpec, Spec, all_sliding, every_nth_full, upper_sliding

_ATTENTION_WEIGHTS = {
    module: names
    for module, names in LLAMA_WEIGHTS.items()
    if module not in ("layers.{i}.up", "layers.{i}.down")
}
_ROUTER_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")

MIXTRAL = Spec(
    model_type="mixtral",
    weights=_ATTENTION_WEIGHTS
    | {
        "layers.{i}.router": (LAYER + "block_sparse_moe.gate",),
        "layers.{i}.expert_up": tuple(
            LAYER + f"block_sparse_moe.experts.{{e}}.{part}" for part in ("w1", "w3")
        ),
        "layers.{i}.expert_down": (LAYER + "block_sparse_moe.experts.{e}.w2",),
    },
    defaults={
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    unused=_ROUTER_TRAINING,
    windows=all_sliding,
    experts=ExpertSpec(inner="intermediate_size"),
)

_EXPERT = LAYER + "mlp.experts.{e}."
QWEN3_MOE = Spec(
    model_type="qwen3_moe",
    weights=_ATTENTION_WEIGHTS
    | QK_NORMS
    | {
        "layers.{i}.router": (LAYER + "mlp.gate",),
        "layers.{i}.expert_up": (_EXPERT + "gate_proj", _EXPERT + "up_proj"),
        "layers.{i}.expert_down": (_EXPERT + "down_proj",),
    },
    defaults=QWEN_DEFAULTS
    | {
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
    },
    required={"decoder_sparse_step": 1, "mlp_only_layers": []},
    unused=_ROUTER_TRAINING,
    windows=upper_sliding,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    experts=ExpertSpec(inner="moe_intermediate_size", normalized="norm_topk_prob"),
)

GPT_OSS = Spec(
    model_type="gpt_oss",
    weights=_ATTENTION_WEIGHTS
    | {
        "layers.{i}.sinks": (LAYER + "self_attn.sinks",),
        "layers.{i}.router": (LAYER + "mlp.router",),
        "layers.{i}.expert_up": (LAYER + "mlp.experts",),
        "layers.{i}.expert_down": (LAYER + "mlp.experts",),
    },
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
    },
    required={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    unused=(*_ROUTER_TRAINING, "experts_per_token", "initial_context_length"),
    windows=every_nth_full,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    experts=ExpertSpec(
        inner="intermediate_size",
        limit=7.0,
        stacked={"expert_up": "gate_up_proj", "expert_down": "down_proj"},
        bias=True,
    ),
)
