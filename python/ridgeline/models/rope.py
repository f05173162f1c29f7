"""Rotary embeddings: their settings in a configuration, and the tables that the ops read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ridgeline.models.values import ConfigValues, positive

_ORIGINAL = "original_max_position_embeddings"
# Kind of scaling -> the keys it needs and those it may have.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor", "factor", _ORIGINAL), ("attention_factor",)),
}
_ALIASES = {"su": "longrope"}  # its first name
_ALWAYS = ("rope_type", "type", "rope_theta")
_PARTIAL = "partial_rotary_factor"
_LISTS = ("short_factor", "long_factor")  # a number for each frequency; every other key has one
_ANY = ("mscale", "mscale_all_dim", "truncate")  # may be zero or a flag
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class RopeConfig:
    """Rotation of the first ``dim`` elements of a head.

    Attributes:
        theta: the base of the frequencies.
        kind: how they are scaled, one of transformers' ``rope_type``; ``scaling`` has its numbers.
        interleaved: pairs are neighbours instead of half of ``dim`` apart.
    """

    dim: int
    theta: float = 10000.0
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict, hash=False)
    interleaved: bool = False


def read_ropes(
    values: ConfigValues, head_dim: int, max_position: int, interleaved: bool
) -> dict[str, RopeConfig]:
    """The rotation of each layer type.

    Newer files hold everything in ``rope_parameters``, for all layers or for each type; older ones
    split it in several keys.
    """
    newer, older = values.get("rope_parameters"), values.get("rope_scaling")
    given = older or newer or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_parameters must be a JSON object, got {given!r}")
    by_type = not set(given).isdisjoint(LAYER_TYPES)
    if by_type and not set(given) <= set(LAYER_TYPES):
        raise ValueError(
            f"rope_parameters must be for {' and '.join(LAYER_TYPES)}, got {', '.join(given)}"
        )
    theta, local_theta = values.get("rope_theta", 10000.0), values.own("rope_local_base_freq")
    original, partial = values.get(_ORIGINAL), values.own(_PARTIAL)

    def read(scaling: Mapping[str, Any], theta: float) -> RopeConfig:
        numbers = {key: value for key, value in scaling.items() if value is not None}
        # Only architectures that declare it rotate part of a head: others turn all of it.
        part = 1.0 if partial is None else numbers.pop(_PARTIAL, partial)
        kind, numbers = _scaling(numbers, max_position, original)
        dim = int(head_dim * part)
        for key in _LISTS:
            if key in numbers and len(numbers[key]) != dim // 2:
                raise ValueError(
                    f"{key} must have a number for each of {dim // 2} frequencies, "
                    f"got {len(numbers[key])}"
                )
        theta = positive("rope_theta", scaling.get("rope_theta", theta))
        return RopeConfig(dim, theta, kind, numbers, interleaved)

    if not by_type:
        full = read(given, theta)
        sliding = full if local_theta is None else read({}, local_theta)
    else:
        full = read(given.get("full_attention") or {}, theta)
        local = given.get("sliding_attention") or {}
        sliding = read(local, theta if local_theta is None else local_theta)
    return {"full_attention": full, "sliding_attention": sliding}


def _scaling(
    given: Mapping[str, Any], max_position: int, original: int | None
) -> tuple[str, dict[str, Any]]:
    """The kind and its numbers, all that it needs."""
    name = given.get("rope_type", given.get("type", "default"))
    kind = _ALIASES.get(name, name)
    if kind not in _KINDS:
        raise ValueError(f"rope_type must be one of {', '.join(_KINDS)}, got {name!r}")
    required, optional = _KINDS[kind]
    numbers = {key: value for key, value in given.items() if key not in _ALWAYS}
    if _ORIGINAL in required:
        numbers[_ORIGINAL] = original or numbers.get(_ORIGINAL, max_position)
        positive(_ORIGINAL, numbers[_ORIGINAL])
    if kind == "longrope":
        numbers.setdefault("factor", max_position / numbers[_ORIGINAL])
    missing = [key for key in required if key not in numbers]
    if missing:
        raise ValueError(f"rope_type {name!r} needs {', '.join(missing)}, got {dict(given)}")
    unknown = [key for key in numbers if key not in required + optional]
    if unknown:
        raise ValueError(
            f"rope_type {name!r} has keys that are not understood: {', '.join(unknown)}; "
            f"understood are {', '.join(_ALWAYS + required + optional)}"
        )
    for key, value in numbers.items():
        if key in _LISTS and not isinstance(value, list):
            raise ValueError(f"{key} must be a list of numbers, got {value!r}")
        if key not in _ANY:
            for number in value if key in _LISTS else [value]:
                positive(key, number)
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise ValueError(
            f"high_freq_factor must be more than low_freq_factor, {numbers['low_freq_factor']}, "
            f"got {numbers['high_freq_factor']}"
        )
    return kind, numbers


def reach(rope: RopeConfig) -> int:
    """Positions that the scaling makes room for, whatever ``max_position_embeddings`` says: files
    are told to turn YaRN on by adding the scaling alone."""
    if rope.kind != "yarn":
        return 0
    return int(rope.scaling["factor"] * rope.scaling[_ORIGINAL])


def inverse_frequencies(rope: RopeConfig, max_position: int) -> Tensor:
    """Angle per position of each pair, float32 ``[dim / 2]``, as transformers computes it.

    "dynamic" changes nothing up to ``max_position_embeddings``, and the engine goes no further.
    "longrope" has two sets and transformers takes the long one when a sequence is longer than the
    original length. Cached keys cannot be rotated again, so ``max_position`` decides here.
    """
    exponent = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    frequencies = 1.0 / (rope.theta**exponent)
    scaling = rope.scaling
    if rope.kind == "linear":
        return frequencies / scaling["factor"]
    if rope.kind == "llama3":
        turns = scaling[_ORIGINAL] * frequencies / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        return _blend(frequencies, scaling["factor"], (turns - low) / (high - low))
    if rope.kind == "yarn":
        return _blend(frequencies, scaling["factor"], 1 - _yarn_ramp(rope))
    if rope.kind == "longrope":
        long = max_position > scaling[_ORIGINAL]
        factors = exponent.new_tensor(scaling["long_factor" if long else "short_factor"])
        return 1.0 / (factors * rope.theta**exponent)
    return frequencies


def _blend(frequencies: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Slow frequencies are divided, fast ones (``kept`` 1 and more) stay."""
    kept = kept.clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor


def _yarn_ramp(rope: RopeConfig) -> Tensor:
    """From 0 at the pair that turns ``beta_fast`` times in the original length, to 1 at the one
    that turns ``beta_slow`` times. Source: Peng et al., "YaRN", 2023."""

    def pair(turns: float) -> float:
        length = rope.scaling[_ORIGINAL] / (turns * 2 * math.pi)
        return rope.dim * math.log(length) / (2 * math.log(rope.theta))

    fast, slow = pair(rope.scaling.get("beta_fast", 32)), pair(rope.scaling.get("beta_slow", 1))
    if rope.scaling.get("truncate", True):
        fast, slow = math.floor(fast), math.ceil(slow)
    fast, slow = max(fast, 0), min(slow, rope.dim - 1)
    width = slow - fast or 0.001  # equal ends would divide by zero
    return ((torch.arange(rope.dim // 2, dtype=torch.float32) - fast) / width).clamp(0, 1)


def attention_factor(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by, so that longer texts keep their entropy."""
    scaling = rope.scaling
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if "attention_factor" in scaling:
        return float(scaling["attention_factor"])
    factor = scaling["factor"]
    if factor <= 1:
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(scaling[_ORIGINAL]))
    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if not over or not under:
        over, under = 1, 0
    return float((0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1))


def cos_sin_table(rope: RopeConfig, max_position: int) -> Tensor:
    """Float32 ``[max_position, dim]``: the cosines of a position, then its sines."""
    positions = torch.arange(max_position, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, max_position))
    return torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor(rope)
