"""GGUF files: a configuration from their metadata, and weights by the checkpoint's names.

The ``gguf`` package reads the container and knows the names; it is imported here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.models.config import ModelConfig
from ridgeline.models.weights import Part, parameters
from ridgeline.quant.ggml import EXPANDED, Q4_0_GROUP, q4_0
from ridgeline.quant.stored import Expanded, Weight

# Architectures whose files say all that a configuration must. "llama" is Mistral too, and has the
# rows of q and k in the order of neighbouring pairs.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_KEYS = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_REQUIRED = (
    "attention.head_count", "block_count", "context_length", "embedding_length",
    "feed_forward_length",
)  # fmt: skip
_READ = {
    "attention.value_length", "expert_count", "expert_used_count", "rope.dimension_count",
    "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "rope.scaling.type",
}  # fmt: skip
_PLAIN = ("F16", "F32", "BF16")
_FREQUENCIES = "rope_freqs.weight"


def gguf_file(model: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one of a folder without config.json."""
    if model.suffix == ".gguf" and model.is_file():
        return model
    files = sorted(model.glob("*.gguf")) if model.is_dir() else []
    if not files or (model / "config.json").is_file():
        return None
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise ValueError(f"{model} holds several GGUF files, name one: {names}")
    return files[0]


class GgufFile:
    """One file, its header read."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ImportError("GGUF files need the gguf package: pip install gguf") from error
        self.path = path
        try:
            reader = GGUFReader(path)
            self.values: dict[str, Any] = {
                key: field.contents()
                for key, field in reader.fields.items()
                if not key.startswith("tokenizer.") or key.endswith("_token_id")
            }
            tokens = reader.fields.get("tokenizer.ggml.tokens")
            self._vocab_size = 0 if tokens is None else len(tokens.data)
        except Exception as error:  # The package raises what numpy does, for a malformed file.
            raise ValueError(f"{path} is truncated or not a GGUF file: {error!r}") from error
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def config(self) -> ModelConfig:
        try:
            return ModelConfig.from_dict(self._config())
        except (ValueError, TypeError) as error:
            raise type(error)(f"{self.path}: {error}") from error

    @property
    def quantized(self) -> bool:
        return any(t.tensor_type.name not in _PLAIN for t in self.tensors.values())

    def kept_bytes(self, dtype: torch.dtype) -> int:
        """Of weights that are quantised, as they are kept; 0 if they are not quantised."""
        if not self.quantized:
            return 0
        return sum(_kept_bytes(tensor, dtype) for tensor in self.tensors.values())

    def _config(self) -> dict[str, Any]:
        kind = self.values.get("general.architecture")
        if kind not in _ARCHITECTURES:
            raise ValueError(
                f"general.architecture must be one of {', '.join(_ARCHITECTURES)}, got {kind!r}"
            )
        own = {
            key.removeprefix(f"{kind}."): value
            for key, value in self.values.items()
            if key.startswith(f"{kind}.")
        }
        config: dict[str, Any] = {"model_type": kind, "vocab_size": self._vocab_size}
        config |= {_KEYS[key]: value for key, value in own.items() if key in _KEYS}
        if own.get("expert_count"):
            raise ValueError("experts (expert_count) are not read from GGUF files")
        for key in sorted(own.keys() - _KEYS.keys() - _READ):
            config[f"{kind}.{key}"] = own[key]  # refused with its name
        missing = [f"{kind}.{key}" for key in _REQUIRED if not own.get(key)]
        if missing:
            raise ValueError(f"no metadata for: {', '.join(missing)}")
        for key in _REQUIRED:
            if not isinstance(own[key], int):
                raise ValueError(
                    f"{kind}.{key}: expected one number for all layers, got {own[key]}"
                )
        head_dim = own["embedding_length"] // own["attention.head_count"]
        rotated = own.get("rope.dimension_count")
        if rotated not in (None, own.get("attention.key_length", head_dim)):
            raise ValueError(f"rope.dimension_count: expected whole heads, got {rotated}")
        config["rope_scaling"] = self._scaling(own)
        config["tie_word_embeddings"] = "output.weight" not in self.tensors
        ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        config["eos_token_id"] = [self.values[key] for key in ends if key in self.values]
        kinds = {tensor.tensor_type.name for tensor in self.tensors.values()}
        config["dtype"] = "bfloat16" if "BF16" in kinds else "float16"
        return config

    def _scaling(self, own: dict[str, Any]) -> dict[str, Any] | None:
        kind = own.get("rope.scaling.type", "none")
        if _FREQUENCIES in self.tensors:  # Llama 3.1's, worked out: one divisor a frequency
            factors = self.tensors[_FREQUENCIES].data.astype("float32").tolist()
            length = own.get("context_length")
            return {
                "rope_type": "longrope", "short_factor": factors, "long_factor": factors,
                "attention_factor": 1.0, "original_max_position_embeddings": length,
            }  # fmt: skip
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
        length = own.get("rope.scaling.original_context_length")
        if length and kind != "linear":  # which does not depend on it
            scaling["original_max_position_embeddings"] = length
        return scaling


def _kept_bytes(tensor: Any, dtype: torch.dtype) -> int:
    count = math.prod(map(int, tensor.shape))
    if tensor.tensor_type.name != "Q4_0" or not tensor.name.startswith("blk."):
        return count * dtype.itemsize
    return count // 2 + count // Q4_0_GROUP * dtype.itemsize


class GgufCheckpoint:
    """Reads the weights of a file as :class:`ridgeline.models.weights.Checkpoint` does."""

    def __init__(self, file: GgufFile, device: torch.device, config: ModelConfig) -> None:
        from gguf import MODEL_ARCH, get_tensor_name_map

        self._file, self._device, self._config = file, device, config
        arch = MODEL_ARCH[config.spec.model_type.upper()]
        self._names = get_tensor_name_map(arch, config.num_layers)
        self.quantized = file.quantized

    def check(self) -> None:
        parts = [part for parameter in parameters(self._config) for part in parameter.parts]
        expected = {self._name(part): part.shape for part in parts}
        problems = []
        for name, shape in expected.items():
            tensor = self._file.tensors.get(name)
            stored = None if tensor is None else tuple(map(int, reversed(tensor.shape)))
            if stored is None:
                problems.append(f"missing: {name} {list(shape)}")
            elif stored != shape:
                problems.append(f"wrong shape: {name}: expected {list(shape)}, got {list(stored)}")
        problems += [
            f"not part of the architecture: {name}"
            for name in self._file.tensors
            if name not in expected and name != _FREQUENCIES
        ]
        if problems:
            raise ValueError(
                f"{self._file.path} does not fit its metadata "
                f"({self._config.spec.model_type}):\n  " + "\n  ".join(problems)
            )

    def is_plain(self, part: Part) -> bool:
        """Whether the tensor is stored unquantised."""
        return self._file.tensors[self._name(part)].tensor_type.name in _PLAIN

    def read(self, part: Part) -> Weight:
        weight = self._stored(self._name(part))
        heads = {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}
        kind = part.module.rpartition(".")[2]
        if self._config.spec.model_type != "llama" or kind not in heads:
            return weight
        index = torch.arange(part.rows, device=self._device)
        index = index.view(heads[kind], -1, 2).transpose(1, 2).flatten()
        return weight[index] if isinstance(weight, Tensor) else weight.rows(index)

    def _stored(self, name: str) -> Weight:
        import numpy
        from gguf import dequantize

        tensor = self._file.tensors[name]
        kind = tensor.tensor_type.name
        if kind not in ("F16", "F32", "Q4_0", *EXPANDED):
            try:
                values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
            except NotImplementedError as error:
                raise ValueError(f"{self._file.path}: {name} is {kind}: {error}") from error
            if kind == "BF16":
                return values.to(self._device, torch.bfloat16)
            return Expanded(values.to(self._device), f"{kind} has no exact counterpart here")
        data = torch.from_numpy(numpy.array(tensor.data)).to(self._device)
        if kind == "Q4_0":
            return q4_0(data)
        if kind in EXPANDED:
            return Expanded(EXPANDED[kind](data), f"{kind} has no exact counterpart here")
        return data

    def _name(self, part: Part) -> str:
        return f"{self._names.get_name(part.module)}.{part.end}"
