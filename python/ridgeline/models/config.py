"""A model's shape, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridgeline.models.rope import RopeConfig, reach, read_ropes
from ridgeline.models.spec import SameAs, Spec
from ridgeline.models.specs import spec_of
from ridgeline.models.values import ConfigValues
from ridgeline.quant.formats import format_of
from ridgeline.quant.layout import Format

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# transformers' names -> the ops'; with a gate "_mul" follows.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
_MOST_LAYERS = 4096  # a number far beyond is a broken file, and a table of that length
_GATED_ACTIVATIONS = ("gelu", "gelu_tanh", "silu")


@dataclass(frozen=True)
class LayerConfig:
    """What may differ from layer to layer.

    Attributes:
        scale: of the attention scores.
        window: keys that a query sees, itself included; None: all.
        rope: None where positions are learned.
    """

    scale: float
    window: int | None
    rope: RopeConfig | None


@dataclass(frozen=True)
class ModelConfig:
    """What the decoder and the loader need to know, whatever the architecture calls it."""

    spec: Spec
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    activation: str
    layers: tuple[LayerConfig, ...]
    attention_softcap: float
    logit_softcap: float
    embedding_scale: float
    parallel: bool
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    num_experts: int = 0
    experts_per_token: int = 0
    normalized_experts: bool = True
    stored_format: Format | None = None

    @classmethod
    def from_path(cls, folder: Path) -> ModelConfig:
        """Reads ``config.json``, the end-of-sequence ids of ``generation_config.json``, and what
        Model Optimizer says in a file of its own."""
        if not folder.is_dir():
            raise FileNotFoundError(f"model must be a folder with a config.json: {folder} is none")
        values = _read_json(folder / "config.json")
        if "auto_map" in values:
            warnings.warn(
                f"{folder / 'config.json'} names code of its own (auto_map): it is not run",
                stacklevel=2,
            )
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = _read_json(generation).get("eos_token_id")
            try:
                _token_ids(eos)
            except ValueError as error:
                raise ValueError(f"{generation}: {error}") from error
            values = values | ({} if eos is None else {"eos_token_id": eos})
        optimizer = folder / "hf_quant_config.json"
        if optimizer.is_file() and not values.get("quantization_config"):
            quantization = _read_json(optimizer).get("quantization")
            if isinstance(quantization, Mapping):
                quantization = {"quant_method": "modelopt", **quantization}
            values = values | {"quantization_config": quantization}
        try:
            return cls.from_dict(values)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{folder / 'config.json'}: {error}") from error

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """From the keys of a Hugging Face configuration.

        Unknown architectures are refused, and keys that could change the results and that no part
        of this library reads.
        """
        spec = spec_of(config)
        if spec.text_config is not None:
            outer = {key: value for key, value in config.items() if value is not None}
            config = {**outer.pop(spec.text_config, {}), **outer}
        names = {"norm_eps": "rms_norm_eps"} | dict(spec.names)
        values = ConfigValues(config, names, spec.defaults)
        for key in ("model_type", *spec.unused):
            values.skip(key)
        for key, value in spec.required.items():
            expected = values.get(value.name) if isinstance(value, SameAs) else value
            if values.get(key, expected) != expected:
                raise ValueError(f"{key} must be {expected!r}, got {values.get(key)!r}")
        hidden, heads = values.size("hidden_size"), values.size("num_attention_heads")
        kv_heads = values.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
                f"({kv_heads})"
            )
        head_dim = values.size("head_dim", hidden // heads)
        if head_dim % 8 or head_dim > 256:
            raise ValueError(
                f"the size of a head (head_dim, or hidden_size / num_attention_heads) must be a "
                f"multiple of 8 up to 256, got {head_dim}"
            )
        max_position = values.size("max_position_embeddings")
        layers = _layers(values, spec, head_dim, max_position)
        ropes = [layer.rope for layer in layers if layer.rope is not None]
        result = cls(
            spec=spec,
            vocab_size=values.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=_inner(values, spec, hidden),
            num_layers=len(layers),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position=max([max_position] + [reach(rope) for rope in ropes]),
            norm_eps=values.number("norm_eps", 1e-6),
            activation=_activation(values, spec),
            layers=layers,
            attention_softcap=float(values.own("attn_logit_softcapping") or 0),
            logit_softcap=float(values.own("final_logit_softcapping") or 0),
            embedding_scale=hidden**0.5 if spec.scaled_embedding else 1.0,
            parallel=values.flag(spec.parallel),
            tied_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=values.flag(spec.qkv_bias),
            output_bias=values.flag(spec.output_bias),
            mlp_bias=values.flag(spec.mlp_bias),
            dtype=_dtype(values),
            eos_token_ids=_token_ids(values.get("eos_token_id")),
            stored_format=_stored_format(values),
            **_experts(values, spec),
        )
        values.refuse_unread(spec.model_type)
        return result


def _layers(
    values: ConfigValues, spec: Spec, head_dim: int, max_position: int
) -> tuple[LayerConfig, ...]:
    count = values.size("num_hidden_layers")
    if count > _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers must be at most {_MOST_LAYERS}, got {count}")
    windows = spec.windows(values, count)
    scale = (values.own("query_pre_attn_scalar") or head_dim) ** -0.5
    by_depth = values.own("scale_attn_by_inverse_layer_idx")
    ropes = None
    if "positions" not in spec.weights:
        ropes = read_ropes(values, head_dim, max_position, spec.interleaved_rope)
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return tuple(
        LayerConfig(
            scale=scale / (i + 1) if by_depth else scale,
            window=window,
            rope=None if ropes is None else ropes[kind],
        )
        for i, (window, kind) in enumerate(zip(windows, kinds))
    )


def _inner(values: ConfigValues, spec: Spec, hidden: int) -> int:
    """The width of the MLP, or of one expert."""
    inner = values.size("intermediate_size", spec.default_inner(hidden))
    return inner if spec.experts is None else values.size(spec.experts.inner)


def _experts(values: ConfigValues, spec: Spec) -> dict[str, Any]:
    if spec.experts is None:
        return {}
    # Files have either key; transformers takes both for the same.
    either = "num_experts" if values.get("num_local_experts") is None else "num_local_experts"
    values.skip("num_experts")
    count = values.size(either)
    chosen = values.size("num_experts_per_tok")
    if chosen > count:
        raise ValueError(f"num_experts_per_tok ({chosen}) must be at most {count} experts")
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act of experts must be silu, got {values.get('hidden_act')!r}")
    normalized = values.flag(spec.experts.normalized)
    return {
        "num_experts": count,
        "experts_per_token": chosen,
        "normalized_experts": normalized,
    }


def _activation(values: ConfigValues, spec: Spec) -> str:
    given = values.get("hidden_act", "silu")
    name = _ACTIVATIONS.get(given)
    if name is None or (spec.gated and name not in _GATED_ACTIVATIONS):
        allowed = [
            key
            for key, value in _ACTIVATIONS.items()
            if not spec.gated or value in _GATED_ACTIVATIONS
        ]
        key = spec.names.get("hidden_act", "hidden_act")
        raise ValueError(f"{key} must be one of {', '.join(allowed)}, got {given!r}")
    return f"{name}_mul" if spec.gated else name


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def _dtype(values: ConfigValues) -> torch.dtype:
    newer, older = values.get("dtype"), values.get("torch_dtype")
    name = str(newer or older or "float32")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _stored_format(values: ConfigValues) -> Format | None:
    """How the checkpoint is quantised; None: not at all."""
    newer, older = values.get("quantization_config"), values.get("compression_config")
    given = newer or older
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"quantization_config must be an object, got {given!r}")
    return None if not given else format_of(given)


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    given = value if isinstance(value, (list, tuple)) else [value]
    ids = [token for token in given if isinstance(token, int) and token >= 0]
    if len(ids) != len(given):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return tuple(ids)
