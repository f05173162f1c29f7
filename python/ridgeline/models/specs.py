"""Architectures as data: what each is built of, and what its checkpoints call each parameter.

To add one: a ``Spec`` here, and its rows in ``tests/test_models_families.py`` (docs/models.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.models.spec import Spec, all_sliding, upper_sliding

_LAYER = "model.layers.{i}."
_LLAMA_WEIGHTS = {
    "embedding": ("model.embed_tokens",),
    "layers.{i}.attention_norm": (_LAYER + "input_layernorm",),
    "layers.{i}.qkv": tuple(_LAYER + f"self_attn.{part}_proj" for part in "qkv"),
    "layers.{i}.output": (_LAYER + "self_attn.o_proj",),
    "layers.{i}.mlp_norm": (_LAYER + "post_attention_layernorm",),
    "layers.{i}.up": (_LAYER + "mlp.gate_proj", _LAYER + "mlp.up_proj"),
    "layers.{i}.down": (_LAYER + "mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}

_QK_NORMS = {
    "layers.{i}.q_norm": (_LAYER + "self_attn.q_norm",),
    "layers.{i}.k_norm": (_LAYER + "self_attn.k_norm",),
}

LLAMA = Spec(
    model_type="llama",
    weights=_LLAMA_WEIGHTS,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
)

MISTRAL = Spec(
    model_type="mistral",
    weights=_LLAMA_WEIGHTS,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    windows=all_sliding,
)

_QWEN_DEFAULTS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

QWEN2 = Spec(
    model_type="qwen2",
    weights=_LLAMA_WEIGHTS,
    defaults=_QWEN_DEFAULTS,
    windows=upper_sliding,
    qkv_bias=True,
)

QWEN3 = Spec(
    model_type="qwen3",
    weights=_LLAMA_WEIGHTS | _QK_NORMS,
    defaults=_QWEN_DEFAULTS | {"head_dim": 128},
    windows=upper_sliding,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
)

SPECS = {spec.model_type: spec for spec in (LLAMA, MISTRAL, QWEN2, QWEN3)}


def spec_of(config: Mapping[str, Any]) -> Spec:
    """The architecture of a configuration; one that is not here is refused with the list."""
    model_type = config.get("model_type")
    if model_type not in SPECS:
        raise ValueError(
            f"model_type must be one of the supported architectures ({', '.join(SPECS)}), "
            f"got {model_type!r}"
        )
    return SPECS[model_type]
