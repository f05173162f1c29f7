"""What checkpoints of several families have in common: names and defaults."""

from __future__ import annotations

LAYER = "model.layers.{i}."
LLAMA_WEIGHTS = {
    "embedding": ("model.embed_tokens",),
    "layers.{i}.attention_norm": (LAYER + "input_layernorm",),
    "layers.{i}.qkv": tuple(LAYER + f"self_attn.{part}_proj" for part in "qkv"),
    "layers.{i}.output": (LAYER + "self_attn.o_proj",),
    "layers.{i}.mlp_norm": (LAYER + "post_attention_layernorm",),
    "layers.{i}.up": (LAYER + "mlp.gate_proj", LAYER + "mlp.up_proj"),
    "layers.{i}.down": (LAYER + "mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}

QK_NORMS = {
    "layers.{i}.q_norm": (LAYER + "self_attn.q_norm",),
    "layers.{i}.k_norm": (LAYER + "self_attn.k_norm",),
}

QWEN_DEFAULTS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
