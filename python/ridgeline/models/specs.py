"""Architectures as data: what their checkpoints call each parameter. One row each.

To add one: a ``Spec`` here, and a test against transformers in ``tests/test_models.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spec:
    """One architecture.

    Attributes:
        model_type: the key of ``config.json`` that selects it.
        weights: the decoder's module -> the checkpoint's modules whose rows are stacked into it
            ("{i}" stands for the layer).
        ignored: ends of checkpoint names that hold nothing to load.
        required: configuration values that the decoder assumes.
    """

    model_type: str
    weights: Mapping[str, tuple[str, ...]]
    ignored: tuple[str, ...] = ()
    required: Mapping[str, Any] = field(default_factory=dict)


_LAYER = "model.layers.{i}."

LLAMA = Spec(
    model_type="llama",
    weights={
        "embedding": ("model.embed_tokens",),
        "layers.{i}.attention_norm": (_LAYER + "input_layernorm",),
        "layers.{i}.qkv": (
            _LAYER + "self_attn.q_proj",
            _LAYER + "self_attn.k_proj",
            _LAYER + "self_attn.v_proj",
        ),
        "layers.{i}.output": (_LAYER + "self_attn.o_proj",),
        "layers.{i}.mlp_norm": (_LAYER + "post_attention_layernorm",),
        "layers.{i}.gate_up": (_LAYER + "mlp.gate_proj", _LAYER + "mlp.up_proj"),
        "layers.{i}.down": (_LAYER + "mlp.down_proj",),
        "norm": ("model.norm",),
        "head": ("lm_head",),
    },
    ignored=("rotary_emb.inv_freq",),
    required={"hidden_act": "silu"},
)

SPECS = {spec.model_type: spec for spec in (LLAMA,)}


def spec_of(config: Mapping[str, Any]) -> Spec:
    """The architecture of a configuration; one that is not here is refused with the list."""
    model_type = config.get("model_type")
    if model_type not in SPECS:
        raise ValueError(
            f"model_type must be one of the supported architectures ({', '.join(SPECS)}), "
            f"got {model_type!r}"
        )
    return SPECS[model_type]
