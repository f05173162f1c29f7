"""A model's shape, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ridgeline.models.specs import Spec, spec_of

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_LLAMA3_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and scaling. ``kind``: "default", "linear" or "llama3"."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


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
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_path(cls, folder: Path) -> ModelConfig:
        """Reads ``config.json``, and the end-of-sequence ids of ``generation_config.json``."""
        if not folder.is_dir():
            raise FileNotFoundError(f"model must be a folder with a config.json: {folder} is none")
        values = _read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = _read_json(generation).get("eos_token_id")
            values = values | ({} if eos is None else {"eos_token_id": eos})
        try:
            return cls.from_dict(values)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{folder / 'config.json'}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """From the keys of a Hugging Face configuration; unknown architectures are refused."""
        spec = spec_of(values)
        for key, expected in spec.required.items():
            if values.get(key, expected) != expected:
                raise ValueError(f"{key} must be {expected!r}, got {values[key]!r}")
        hidden, heads = _size(values, "hidden_size"), _size(values, "num_attention_heads")
        kv_heads = _size(values, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
                f"({kv_heads})"
            )
        attention_bias = bool(values.get("attention_bias", False))
        return cls(
            spec=spec,
            vocab_size=_size(values, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_size(values, "intermediate_size"),
            num_layers=_size(values, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_size(values, "head_dim", hidden // heads),
            max_position=_size(values, "max_position_embeddings"),
            norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            rope=_rope(values),
            tied_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(values.get("mlp_bias", False)),
            dtype=_dtype(values.get("dtype") or values.get("torch_dtype") or "float32"),
            eos_token_ids=_token_ids(values.get("eos_token_id")),
        )


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


def _size(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} must be a positive integer, got {value!r}")
    return value


def _rope(values: Mapping[str, Any]) -> RopeConfig:
    """Newer files hold everything in ``rope_parameters``, older ones split it in two keys."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", values.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    missing = [k for k in _LLAMA3_KEYS[: 1 if kind == "linear" else None] if k not in scaling]
    if kind not in ("linear", "llama3"):
        raise ValueError(f'rope_type must be "default", "linear" or "llama3", got {kind!r}')
    if missing:
        raise ValueError(f"rope_type {kind!r} needs {', '.join(missing)}, got {dict(scaling)}")
    if kind == "linear":
        return RopeConfig(theta, kind, float(scaling["factor"]))
    factor, low, high, original = (scaling[key] for key in _LLAMA3_KEYS)
    return RopeConfig(theta, kind, float(factor), float(low), float(high), int(original))


def _dtype(name: object) -> torch.dtype:
    if str(name) not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[str(name)]


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    given = value if isinstance(value, (list, tuple)) else [value]
    ids = [token for token in given if isinstance(token, int) and token >= 0]
    if len(ids) != len(given):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return tuple(ids)
