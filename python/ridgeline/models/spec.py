"""What can differ between architectures, as data, and the ways in which windows alternate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ridgeline.models.rope import LAYER_TYPES
from ridgeline.models.values import ConfigValues

Windows = Callable[[ConfigValues, int], tuple[int | None, ...]]


def no_windows(values: ConfigValues, layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def all_sliding(values: ConfigValues, layers: int) -> tuple[int | None, ...]:
    """One window for all layers, or none."""
    window = None if values.get("sliding_window") is None else values.size("sliding_window")
    return (window,) * layers


def upper_sliding(values: ConfigValues, layers: int) -> tuple[int | None, ...]:
    """From ``max_window_layers`` on, if ``use_sliding_window``; ``layer_types`` go first."""
    first, used = values.get("max_window_layers"), values.get("use_sliding_window")
    sliding = [bool(used) and i >= first for i in range(layers)]
    return _by_type(values, sliding)


def every_nth_full(values: ConfigValues, layers: int) -> tuple[int | None, ...]:
    """The layers between slide; ``layer_types`` go first."""
    n = values.size("sliding_window_pattern")
    return _by_type(values, [(i + 1) % n > 0 for i in range(layers)])


def _by_type(values: ConfigValues, sliding: list[bool]) -> tuple[int | None, ...]:
    types, window = values.get("layer_types"), values.get("sliding_window")
    if types is not None:
        if len(types) != len(sliding) or not set(types) <= set(LAYER_TYPES):
            raise ValueError(
                f"layer_types must be one of {', '.join(LAYER_TYPES)} for each of "
                f"{len(sliding)} layers, got {types!r}"
            )
        sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding):
        window = values.size("sliding_window")
    return tuple(window if slides else None for slides in sliding)


@dataclass(frozen=True)
class SameAs:
    """The value of another key."""

    name: str


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """A mixture of experts in place of the MLP. Values are keys of the configuration.

    Attributes:
        inner: the width of one.
        normalized: the weights of the chosen sum to one; or the key that says so.
        limit: gpt-oss's clamped activation, with its bound.
        stacked: one tensor of all experts, ``[experts, in, out]``, gate and up columns by turns;
            the decoder's module -> its name below ``experts`` (biases: "_bias" after it). Otherwise
            each expert has modules of its own, "{e}" in their names.
        bias: each product has one.
    """

    inner: str
    normalized: bool | str = True
    limit: float | None = None
    stacked: Mapping[str, str] = field(default_factory=dict)
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One architecture.

    Attributes:
        model_type: the key of ``config.json`` that selects it.
        weights: the decoder's module -> the checkpoint's modules whose rows are stacked into it
            ("{i}" stands for the layer). What is optional in the decoder is there if it is here:
            ``positions`` (learned, instead of rotary), ``q_norm`` and ``k_norm``,
            ``post_attention_norm`` and ``post_mlp_norm``, ``sinks`` (one logit a head).
        names: the decoder's name of a configuration value -> its key, where they differ.
        defaults: the values of keys that a configuration may leave out, as transformers has them.
            What only some architectures have (a score's cap, part of a head rotated) is read if
            its key is here.
        required: configuration values that the decoder assumes.
        unused: keys that say nothing to transformers either.
        ignored: beginnings and ends of checkpoint names that hold nothing to load.
        text_config: the key under which a model with more than text has its text model's keys.
        prefix: what the names of a checkpoint of the model without its head leave out.
        norm, norm_offset: the kind of norm, and what is added to its weight.
        inner_multiple: the MLP's width as a multiple of the model's where nothing says it.
        experts: ``router``, ``expert_up`` and ``expert_down`` instead of ``up`` and ``down``.
        gated: the MLP's first product is a gate and a factor.
        parallel: attention and MLP both read the layer's input; or the key that says so.
        qkv_bias, output_bias, mlp_bias: whether there are biases, or the key that says so.
        windows: the attention window of each layer, from the configuration.
        scaled_embedding: embeddings are multiplied by the root of ``hidden_size``.
        interleaved_rope: rotated pairs are neighbours.
        position_offset: rows of learned positions before the first.
        transposed: the layers' matrices are stored as ``[in, out]``.
        qkv_by_head: the stacked projection goes head by head, not queries first.
    """

    model_type: str
    weights: Mapping[str, tuple[str, ...]]
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    text_config: str | None = None
    prefix: str = ""
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    inner_multiple: int | None = None
    experts: ExpertSpec | None = None
    gated: bool = True
    parallel: bool | str = False
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    windows: Windows = no_windows
    scaled_embedding: bool = False
    interleaved_rope: bool = False
    position_offset: int = 0
    transposed: bool = False
    qkv_by_head: bool = False

    def default_inner(self, hidden: int) -> int | None:
        return None if self.inner_multiple is None else self.inner_multiple * hidden
