"""Which tensors a checkpoint must hold, and reading them from safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch import Tensor

from ridgeline.models.config import ModelConfig
from ridgeline.quant.layout import TensorInfo, wrong_dtype
from ridgeline.quant.stored import Weight

_INDEX = "model.safetensors.index.json"
_ROWS = 4096  # of two tensors compared at a time
_FLOATS = ("BF16", "F16", "F32", "F64")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.bin.index.json")


@dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint as its architecture has it.

    Attributes:
        rows, columns: of the weight as the decoder uses it; columns 0: a vector.
        transposed: stored as ``[columns, rows]``.
        experts: so many are stored as one tensor, ``[experts, ...]``; ``rows`` are those of all.
    """

    module: str
    end: str
    rows: int
    columns: int
    transposed: bool = False
    experts: int = 0

    @property
    def name(self) -> str:
        return f"{self.module}.{self.end}"

    def used(self, stored: Tensor) -> Tensor:
        """The weight ``[rows, columns]`` of what a file holds unquantised."""
        weight = stored.transpose(-1, -2) if self.transposed else stored
        return weight.flatten(0, 1) if self.experts else weight

    def stored(self, used: Tensor) -> Tensor:
        """The inverse of :meth:`used`."""
        weight = used.unflatten(0, (self.experts, -1)) if self.experts else used
        return weight.transpose(-1, -2) if self.transposed else weight

    @property
    def base(self) -> str:
        """What the names of a quantised weight begin with."""
        return self.name if self.experts else self.module

    @property
    def shape(self) -> tuple[int, ...]:
        rows = self.rows // self.experts if self.experts else self.rows
        of_one = (rows, self.columns) if self.columns else (rows,)
        of_one = of_one[::-1] if self.transposed else of_one
        return (self.experts, *of_one) if self.experts else of_one


@dataclass(frozen=True)
class Parameter:
    """One tensor of the decoder: the rows of ``parts``, stacked.

    Attributes:
        arrange: the rows of a part as the decoder has them, from those that are stored.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    arrange: Callable[[Tensor], Tensor] | None = None


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every tensor of the decoder that ``config`` describes, layer by layer."""
    spec, shapes = config.spec, _shapes(config)
    for module, sources in spec.weights.items():
        if module == "head" and config.tied_embeddings:
            continue
        kind = module.removeprefix("layers.{i}.")
        rows, columns, bias = shapes[kind]
        stored_rows = rows if len(sources) == len(rows) else (sum(rows),)
        if kind == "positions":
            stored_rows = (rows[0] + spec.position_offset,)
        for i in range(config.num_layers if kind != module else 1):
            for end, width in (("weight", columns), ("bias", 0))[: 1 + bias]:
                if kind.startswith("expert_"):
                    parts = _expert_parts(kind, sources, i, end, rows, width, config)
                elif kind == "sinks":
                    parent, _, last = sources[0].format(i=i).rpartition(".")
                    parts = (Part(parent, last, rows[0], 0),)
                else:
                    transposed = spec.transposed and kind != module and width > 0
                    parts = tuple(
                        Part(source.format(i=i), end, r, width, transposed)
                        for source, r in zip(sources, stored_rows, strict=True)
                    )
                count = sum(part.rows for part in parts)
                count = rows[0] if kind == "positions" else count
                yield Parameter(
                    name=f"{module.format(i=i)}.{end}",
                    shape=(count, width) if width else (count,),
                    parts=parts,
                    arrange=_arrangement(kind, config),
                )


def _expert_parts(
    kind: str,
    sources: tuple[str, ...],
    layer: int,
    end: str,
    rows: tuple[int, ...],
    columns: int,
    config: ModelConfig,
) -> tuple[Part, ...]:
    """One tensor of all experts, or each expert's one after the other."""
    experts, count = config.spec.experts, config.num_experts
    assert experts is not None
    if kind in experts.stacked:
        name = experts.stacked[kind] + ("" if end == "weight" else "_bias")
        all_rows = count * sum(rows)
        return (Part(sources[0].format(i=layer), name, all_rows, columns, columns > 0, count),)
    return tuple(
        Part(source.format(i=layer, e=expert), end, r, columns)
        for expert in range(count)
        for source, r in zip(sources, rows, strict=True)
    )


def _shapes(config: ModelConfig) -> dict[str, tuple[tuple[int, ...], int, bool]]:
    """Kind of module -> rows of each part, columns (0: a vector), and whether it has a bias."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    norm = ((hidden,), 0, config.spec.norm == "layer")
    head_norm = ((config.head_dim,), 0, False)
    expert_bias = config.spec.experts is not None and config.spec.experts.bias
    return {
        "embedding": ((vocab,), hidden, False),
        "positions": ((config.max_position,), hidden, False),
        "attention_norm": norm,
        "qkv": ((query, kv, kv), hidden, config.qkv_bias),
        "q_norm": head_norm,
        "k_norm": head_norm,
        "output": ((hidden,), query, config.output_bias),
        "post_attention_norm": norm,
        "mlp_norm": norm,
        "up": ((inner,) * (1 + config.spec.gated), hidden, config.mlp_bias),
        "down": ((hidden,), inner, config.mlp_bias),
        "post_mlp_norm": norm,
        "sinks": ((config.num_heads,), 0, False),
        "router": ((config.num_experts,), hidden, expert_bias),
        "expert_up": ((inner, inner), hidden, expert_bias),
        "expert_down": ((hidden,), inner, expert_bias),
        "norm": norm,
        "head": ((vocab,), hidden, False),
    }


def _arrangement(kind: str, config: ModelConfig) -> Callable[[Tensor], Tensor] | None:
    if kind == "positions":
        return lambda stored: stored[config.spec.position_offset :]
    if kind == "qkv" and config.spec.qkv_by_head:
        shape = (config.num_heads, 3, config.head_dim)
        return lambda stored: stored.unflatten(0, shape).transpose(0, 1).flatten(0, 2)
    if kind == "expert_up" and config.spec.experts is not None and config.spec.experts.stacked:
        pairs = (config.num_experts, config.intermediate_size, 2)  # gate and up rows by turns
        return lambda stored: stored.unflatten(0, pairs).transpose(1, 2).flatten(0, 2)
    return None


class Checkpoint:
    """The safetensors files of a folder: checked as a whole first, then read tensor by tensor.

    Args:
        folder: holds ``model.safetensors``, or ``model.safetensors.index.json`` and its shards.
        device: where tensors are read to.
        config: what the files must hold.
    """

    def __init__(self, folder: Path, device: torch.device, config: ModelConfig) -> None:
        self._folder = folder
        self._config = config
        self.quantized = config.stored_format is not None
        self._file_of: dict[str, Any] = {}
        for path in _files(folder):
            handle = _open(path, device)
            self._file_of.update(dict.fromkeys(handle.keys(), handle))
        # A checkpoint in which no name begins with the prefix leaves it out.
        prefix = config.spec.prefix
        has_prefix = any(name.startswith(prefix) for name in self._file_of)
        self._missing_prefix = "" if has_prefix else prefix
        self._file_of = {self._missing_prefix + name: file for name, file in self._file_of.items()}
        self._stored: dict[str, TensorInfo] = {}
        for name, handle in self._file_of.items():
            header = handle.get_slice(self.stored_name(name))
            self._stored[name] = TensorInfo(tuple(header.get_shape()), str(header.get_dtype()))

    def check(self) -> None:
        """All that is missing, left over or of a wrong shape or dtype, in one error."""
        parts = [part for parameter in parameters(self._config) for part in parameter.parts]
        expected: dict[str, tuple[int, ...]] = {}
        for part in parts:
            expected |= self._layout(part) or {part.name: part.shape}
        problems = [f"missing: {name} {list(shape)}" for name, shape in expected.items()
                    if name not in self._stored]  # fmt: skip
        own = {} if self._config.stored_format is None else self._config.stored_format.dtypes
        for name, (shape, dtype) in self._stored.items():
            if name not in expected:
                if not self._may_be_left_over(name) and not self._is_zero_bias(name):
                    problems.append(f"not part of the architecture: {name}")
            elif shape != expected[name]:
                problems.append(
                    f"wrong shape: {name}: expected {list(expected[name])}, got {list(shape)}"
                )
            elif (wanted := wrong_dtype(name, dtype, own)) is not None:
                problems.append(f"wrong dtype: {name}: expected {wanted}, got {dtype}")
        for part in parts:
            plain = self._layout(part) is None and part.name in self._stored
            if plain and self._stored[part.name].dtype not in _FLOATS:
                problems.append(
                    f"not a floating-point tensor: {part.name} is {self._stored[part.name].dtype}, "
                    "which config.json gives no quantization_config for"
                )
        problems += self._untied()
        if problems:
            raise ValueError(
                f"the checkpoint in {self._folder} does not fit its config.json "
                f"({self._config.spec.model_type}):\n  " + "\n  ".join(problems)
            )

    def is_plain(self, part: Part) -> bool:
        """Whether the tensor is stored unquantised."""
        return self._layout(part) is None

    def read(self, part: Part) -> Weight:
        """The weight ``[rows, columns]``, or the vector. Requires: :meth:`check` passed."""
        if self._layout(part) is None:
            return part.used(self._get(part.name))
        stored_format = self._config.stored_format
        assert stored_format is not None
        sizes = part.rows, part.columns
        return stored_format.read(part.base, *sizes, self._stored, self._get)

    def names(self) -> Iterator[str]:
        """Of all tensors, as the architecture calls them."""
        yield from self._file_of

    def tensor(self, name: str) -> Tensor:
        """As it is stored, by the architecture's name."""
        return self._get(name)

    def stored_name(self, name: str) -> str:
        """In the files, which may leave out a prefix."""
        return name.removeprefix(self._missing_prefix)

    def _layout(self, part: Part) -> dict[str, tuple[int, ...]] | None:
        """The tensors of a quantised weight; None: it is stored as it is."""
        stored_format = self._config.stored_format
        if stored_format is None or not part.columns:
            return None
        return stored_format.layout(part.base, part.rows, part.columns, self._stored)

    def _get(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(self.stored_name(name))
        return tensor

    def _may_be_left_over(self, name: str) -> bool:
        spec, stored_format = self._config.spec, self._config.stored_format
        head = spec.weights["head"][0]
        tied_head = self._config.tied_embeddings and name == f"{head}.weight"
        ignored = spec.ignored + (() if stored_format is None else stored_format.ignored)
        return tied_head or name.startswith(spec.ignored) or name.endswith(ignored)

    def _untied(self) -> list[str]:
        """A head of its own where the configuration ties it: either of them may be meant."""
        weights = self._config.spec.weights
        embedding, head = (f"{weights[key][0]}.weight" for key in ("embedding", "head"))
        if not self._config.tied_embeddings or not {embedding, head} <= self._stored.keys():
            return []
        both = [self._file_of[n].get_slice(self.stored_name(n)) for n in (embedding, head)]
        shape, of_head = (piece.get_shape() for piece in both)
        pairs = ([t[i : i + _ROWS].float() for t in both] for i in range(0, shape[0], _ROWS))
        if shape == of_head and all(torch.equal(*pair) for pair in pairs):
            return []
        return [
            f"not tied: {head} differs from {embedding}, which tie_word_embeddings makes the head: "
            "leave the tensor out, or set it to false"
        ]

    def _is_zero_bias(self, name: str) -> bool:
        """Early GPTQ tools give every matrix a bias: zeros where the model has none."""
        module, _, end = name.rpartition(".")
        return end == "bias" and f"{module}.qweight" in self._stored and not self._get(name).any()


def _open(path: Path, device: torch.device) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("loading weights needs safetensors: pip install safetensors") from error
    try:
        return safe_open(path, framework="pt", device=str(device))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error


def _files(folder: Path) -> list[Path]:
    index, single = folder / _INDEX, folder / "model.safetensors"
    if index.is_file():
        return _shards(folder, index)
    if single.is_file():
        return [single]
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} holds its weights as pickle files ({', '.join(pickled)}), which can run "
            "code when loaded and are refused: convert them to safetensors"
        )
    raise FileNotFoundError(f"no weights in {folder}: neither {single.name} nor {index.name}")


def _shards(folder: Path, index: Path) -> list[Path]:
    """The files that the index names; each must be inside the folder."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{index} is not a safetensors index: file names must be text: {names}")
    for name in names:
        # Judged by both systems' rules, so that a file is refused everywhere or nowhere.
        for path in (PurePosixPath(name), PureWindowsPath(name)):
            if path.is_absolute() or path.drive or path.root or ".." in path.parts:
                raise ValueError(f"{index} names a file outside its folder: {name!r}")
        if not name.endswith(".safetensors"):
            raise ValueError(f"{index} names a file that is not safetensors: {name!r}")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{index} names files that do not exist: {', '.join(missing)}")
    return [folder / name for name in names]
