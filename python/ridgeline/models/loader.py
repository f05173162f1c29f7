"""From a checkpoint, or from nothing, to a decoder on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.models.config import ModelConfig
from ridgeline.models.decoder import Decoder, Layer
from ridgeline.models.linear import DenseLinear, Linear, make_linear
from ridgeline.models.rope import cos_sin_table
from ridgeline.models.weights import Checkpoint, Parameter, parameters

_RANDOM_STD = 0.02


@dataclass(frozen=True)
class LoadOptions:
    """How weights are kept.

    Attributes:
        dtype: of everything that is not quantised.
        quantization: None, "int4" or "fp8": of the layers' matrices; embedding and head stay.
        max_model_len: rows of the rotary table.
    """

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    quantization: str | None = None
    batch_invariant: bool = False


def load_decoder(
    config: ModelConfig,
    folder: Path,
    options: LoadOptions,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Reads the safetensors files of ``folder``, each tensor straight to the device.

    ``progress`` is called with the tensors read and their number in all. Raises ValueError
    listing everything that does not fit ``config`` before anything is read.
    """
    checkpoint = Checkpoint(folder, options.device)
    checkpoint.check(config)

    def read(parameter: Parameter) -> Tensor:
        out = torch.empty(parameter.shape, dtype=options.dtype, device=options.device)
        row = 0
        for name, shape in parameter.parts:
            out[row : row + shape[0]].copy_(checkpoint.read(name))
            row += shape[0]
        return out

    return _build(config, options, read, progress)


def random_decoder(
    config: ModelConfig,
    options: LoadOptions,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Weights from a normal distribution, made on the device; norms are 1 and biases 0."""
    generator = torch.Generator(options.device).manual_seed(seed)

    def make(parameter: Parameter) -> Tensor:
        out = torch.empty(parameter.shape, dtype=options.dtype, device=options.device)
        if out.dim() == 2:
            return out.normal_(0, _RANDOM_STD, generator=generator)
        return out.fill_(0 if parameter.name.endswith(".bias") else 1)

    return _build(config, options, make, progress)


def _build(
    config: ModelConfig,
    options: LoadOptions,
    get: Callable[[Parameter], Tensor],
    progress: Callable[[int, int], None] | None,
) -> Decoder:
    """Takes the parameters one by one, so that quantising needs one full matrix at a time."""
    table = {parameter.name: parameter for parameter in parameters(config)}
    total = len(table)

    def take(name: str) -> Tensor:
        tensor = get(table.pop(name))
        if progress is not None:
            progress(total - len(table), total)
        return tensor

    def linear(name: str) -> Linear:
        weight = take(f"{name}.weight")
        bias = take(f"{name}.bias") if f"{name}.bias" in table else None
        try:
            return make_linear(
                weight,
                bias,
                quantization=options.quantization,
                batch_invariant=options.batch_invariant,
            )
        except ValueError as error:
            raise ValueError(f"quantization {options.quantization!r} of {name}: {error}") from error

    def layer(i: int) -> Layer:
        return Layer(
            attention_norm=take(f"layers.{i}.attention_norm.weight"),
            qkv=linear(f"layers.{i}.qkv"),
            output=linear(f"layers.{i}.output"),
            mlp_norm=take(f"layers.{i}.mlp_norm.weight"),
            gate_up=linear(f"layers.{i}.gate_up"),
            down=linear(f"layers.{i}.down"),
        )

    embedding = take("embedding.weight")
    head = embedding if config.tied_embeddings else take("head.weight")
    decoder = Decoder(
        config=config,
        embedding=embedding,
        layers=tuple(layer(i) for i in range(config.num_layers)),
        norm=take("norm.weight"),
        head=DenseLinear(head, None, options.batch_invariant),
        cos_sin=cos_sin_table(config.rope, config.head_dim, options.max_model_len).to(
            options.device
        ),
        batch_invariant=options.batch_invariant,
    )
    assert not table, f"never used: {list(table)}"
    return decoder
