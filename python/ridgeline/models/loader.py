"""From a checkpoint, or from nothing, to a decoder on the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ridgeline.models.config import ModelConfig
from ridgeline.models.decoder import Decoder, Layer
from ridgeline.models.expert_linear import ExpertLinear, make_experts
from ridgeline.models.experts import Experts
from ridgeline.models.gguf import GgufCheckpoint, GgufFile
from ridgeline.models.linear import DenseLinear, Linear, make_linear
from ridgeline.models.norms import LayerNorm, Norm, RmsNorm
from ridgeline.models.rope import RopeConfig, cos_sin_table
from ridgeline.models.stored_linear import stored_linear
from ridgeline.models.weights import Checkpoint, Parameter, Part, parameters
from ridgeline.quant.stored import Weight, dense, is_finite, stack

_RANDOM_STD = 0.02


@dataclass(frozen=True)
class LoadOptions:
    """How weights are kept.

    Attributes:
        dtype: of everything that is not quantised.
        quantization: None, "int4", "w4a8", "fp8" or "int8": of the layers' matrices; embedding and
            head stay. Of a checkpoint that is quantised None, or, of MXFP4, "fp8".
        max_model_len: rows of the rotary tables.
        keeps_fp4: experts in 4-bit floats stay so; else they become the same values in e4m3.
        check_weights: refuse NaN and infinity; reads every tensor once more.
    """

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    quantization: str | None = None
    keeps_fp4: bool = True
    batch_invariant: bool = False
    check_weights: bool = False


def check_quantization(quantization: str | None, quantized: bool, kept_as: str | None) -> None:
    """``quantized``: the checkpoint is already. ``kept_as``: of its format. ValueError if it cannot
    be as ``quantization`` says."""
    taken = (None, "fp8") if kept_as == "fp4" else (None,)
    if quantized and quantization not in taken:
        raise ValueError(
            f"quantization must be {' or '.join(map(repr, taken))} for a checkpoint that is "
            f"quantised already, got {quantization!r}"
        )


def load_decoder(
    config: ModelConfig,
    folder: Path | GgufFile,
    options: LoadOptions,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Reads the safetensors files of ``folder`` or a GGUF file, each tensor straight to the device.

    ``progress`` is called with the tensors read and their number in all. Raises ValueError
    listing everything that does not fit ``config`` before anything is read, and all tensors that
    hold NaN or infinity, if that is checked.
    """
    checkpoint: Checkpoint | GgufCheckpoint
    if isinstance(folder, GgufFile):
        checkpoint = GgufCheckpoint(folder, options.device, config)
    else:
        checkpoint = Checkpoint(folder, options.device, config)
    stored = config.stored_format
    kept_as = None if stored is None else stored.kept_as
    check_quantization(options.quantization, checkpoint.quantized, kept_as)
    if checkpoint.quantized:
        options = replace(options, quantization=None, keeps_fp4=options.quantization != "fp8")
    checkpoint.check()

    broken: list[str] = []

    def read(part: Part) -> Weight:
        weight = checkpoint.read(part)
        if options.check_weights and not is_finite(weight):
            broken.append(part.name)
        return weight

    def assembled(parameter: Parameter) -> Weight:
        plain = all(checkpoint.is_plain(part) for part in parameter.parts)
        return assemble(parameter, read, options, plain=plain)

    decoder = build_decoder(config, options, assembled, progress)
    if broken:
        raise ValueError(f"not all values are finite in: {', '.join(broken)}")
    return decoder


def assemble(
    parameter: Parameter, read: Callable[[Part], Weight], options: LoadOptions, *, plain: bool
) -> Weight:
    """The rows of all parts as the decoder has them; ``plain``: none is quantised."""

    def one(part: Part) -> Weight:
        weight = read(part)
        if parameter.arrange is None:
            return weight
        if isinstance(weight, Tensor):
            return parameter.arrange(weight)
        return weight.rows(parameter.arrange(torch.arange(part.rows, device=options.device)))

    if not plain:
        return stack([one(part) for part in parameter.parts], options.dtype)
    out = torch.empty(parameter.shape, dtype=options.dtype, device=options.device)
    row = 0
    for part in parameter.parts:
        values = dense(one(part), options.dtype)
        out[row : row + len(values)].copy_(values)
        row += len(values)
    return out


def random_decoder(
    config: ModelConfig,
    options: LoadOptions,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Weights from a normal distribution, made on the device; norms are 1 and biases 0."""
    check_quantization(options.quantization, False, None)
    generator = torch.Generator(options.device).manual_seed(seed)

    def make(parameter: Parameter) -> Tensor:
        out = torch.empty(parameter.shape, dtype=options.dtype, device=options.device)
        if out.dim() == 2:
            return out.normal_(0, _RANDOM_STD, generator=generator)
        return out.fill_(0 if parameter.name.endswith(".bias") else 1 - config.spec.norm_offset)

    return build_decoder(config, options, make, progress)


def build_decoder(
    config: ModelConfig,
    options: LoadOptions,
    get: Callable[[Parameter], Weight],
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """Takes the parameters one by one, so that quantising needs one full matrix at a time."""
    table = {parameter.name: parameter for parameter in parameters(config)}
    total = len(table)
    cos_sin: dict[RopeConfig, Tensor] = {}

    expanded: dict[str, list[str]] = {}  # why -> the matrices

    def take_stored(name: str) -> Weight:
        weight = get(table.pop(name))
        if progress is not None:
            progress(total - len(table), total)
        return weight

    def take(name: str) -> Tensor:
        return dense(take_stored(name), options.dtype)

    def take_if_there(name: str) -> Tensor | None:
        return take(name) if name in table else None

    def experts(name: str) -> Experts:
        def stacked(kind: str) -> ExpertLinear:
            weight = take_stored(f"{name}.{kind}.weight")
            bias = take_if_there(f"{name}.{kind}.bias")
            made, reason = make_experts(
                weight,
                bias,
                config.num_experts,
                options.dtype,
                options.quantization,
                options.batch_invariant,
                options.keeps_fp4,
            )
            if reason is not None:
                expanded.setdefault(reason, []).append(f"{name}.{kind}")
            return made

        router, bias = take(f"{name}.router.weight"), take_if_there(f"{name}.router.bias")
        up, down = stacked("expert_up"), stacked("expert_down")
        assert config.spec.experts is not None
        return Experts(
            router=DenseLinear(router, bias, options.batch_invariant),
            up=up,
            down=down,
            per_token=config.experts_per_token,
            normalized=config.normalized_experts,
            limit=config.spec.experts.limit,
        )

    def linear(name: str) -> Linear:
        weight, bias = take_stored(f"{name}.weight"), take_if_there(f"{name}.bias")
        if not isinstance(weight, Tensor):
            made, reason = stored_linear(weight, bias, options.dtype, options.batch_invariant)
            if reason is not None:
                expanded.setdefault(reason, []).append(name)
            return made
        try:
            return make_linear(
                weight,
                bias,
                quantization=options.quantization,
                batch_invariant=options.batch_invariant,
            )
        except ValueError as error:
            raise ValueError(f"quantization {options.quantization!r} of {name}: {error}") from error

    def norm(name: str) -> Norm:
        weight = take(f"{name}.weight")
        if config.spec.norm == "layer":
            return LayerNorm(weight, take(f"{name}.bias"), config.norm_eps)
        return RmsNorm(weight, config.norm_eps, config.spec.norm_offset)

    def norm_if_there(name: str) -> Norm | None:
        return norm(name) if f"{name}.weight" in table else None

    def rotation(rope: RopeConfig) -> Tensor:
        if rope not in cos_sin:
            cos_sin[rope] = cos_sin_table(rope, options.max_model_len).to(options.device)
        return cos_sin[rope]

    def layer(i: int) -> Layer:
        settings, dense_mlp = config.layers[i], config.spec.experts is None
        return Layer(
            attention_norm=norm(f"layers.{i}.attention_norm"),
            qkv=linear(f"layers.{i}.qkv"),
            q_norm=norm_if_there(f"layers.{i}.q_norm"),
            k_norm=norm_if_there(f"layers.{i}.k_norm"),
            sinks=take_if_there(f"layers.{i}.sinks.weight"),
            output=linear(f"layers.{i}.output"),
            post_attention_norm=norm_if_there(f"layers.{i}.post_attention_norm"),
            mlp_norm=norm(f"layers.{i}.mlp_norm"),
            up=linear(f"layers.{i}.up") if dense_mlp else None,
            down=linear(f"layers.{i}.down") if dense_mlp else None,
            experts=None if dense_mlp else experts(f"layers.{i}"),
            post_mlp_norm=norm_if_there(f"layers.{i}.post_mlp_norm"),
            scale=settings.scale,
            window=settings.window,
            cos_sin=None if settings.rope is None else rotation(settings.rope),
            interleaved=settings.rope is not None and settings.rope.interleaved,
        )

    embedding = take("embedding.weight")
    head = embedding if config.tied_embeddings else take("head.weight")
    decoder = Decoder(
        config=config,
        embedding=embedding,
        # transformers rounds it too: sqrt(3072) is 55.5 in bfloat16.
        embedding_scale=torch.tensor(config.embedding_scale, dtype=options.dtype).item(),
        positions=take_if_there("positions.weight"),
        layers=tuple(layer(i) for i in range(config.num_layers)),
        norm=norm("norm"),
        head=DenseLinear(head, None, options.batch_invariant),
        batch_invariant=options.batch_invariant,
    )
    assert not table, f"never used: {list(table)}"
    for reason, names in expanded.items():
        warnings.warn(
            f"{len(names)} matrices ({names[0]}{', ...' * (len(names) > 1)}) are kept as "
            f"{options.dtype}: {reason}",
            stacklevel=2,
        )
    return decoder
