"""The arguments of ``LLM`` that say how it runs, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ridgeline.kv_cache import KV_DTYPES, host_memory
from ridgeline.models.config import DTYPES, ModelConfig
from ridgeline.models.linear import QUANTIZATIONS

_LOAD_FORMATS = ("auto", "safetensors", "random")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The keyword arguments of ``LLM``, which documents them; checked here."""

    dtype: str
    device: str | torch.device | None = None
    block_size: int
    max_model_len: int | None
    gpu_memory_utilization: float
    num_blocks: int | None = None
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    seed: int = 0
    quantization: str | None
    kv_cache_dtype: str
    batch_invariant: bool = False
    enforce_eager: bool = False
    load_format: str = "auto"
    check_weights: bool = False
    trace: Path | None = None
    latency_target: float | None = None
    swap_space: float = 0.0

    def __post_init__(self) -> None:
        check_one_of("dtype", self.dtype, ("auto", *DTYPES))
        check_one_of("quantization", self.quantization, (None, *QUANTIZATIONS))
        check_one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", *KV_DTYPES))
        check_one_of("load_format", self.load_format, _LOAD_FORMATS)
        for name, low in (
            ("block_size", 1),
            ("max_model_len", 2),
            ("num_blocks", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is None and name in ("max_model_len", "num_blocks"):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        check_one_of("block_size", self.block_size, tuple(range(16, 257, 16)))
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}")
        for name in ("gpu_memory_utilization", "latency_target", "swap_space"):
            value = getattr(self, name)
            if value is None and name == "latency_target":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number, got {value!r}")
        for name in ("enable_prefix_caching", "batch_invariant", "enforce_eager", "check_weights"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if self.latency_target is not None and not 1e-6 <= self.latency_target <= 1e6:
            raise ValueError(
                f"latency_target must be from 1e-6 to 1e6 seconds, got {self.latency_target}"
            )
        if self.trace is not None and not self.trace.parent.is_dir():
            raise FileNotFoundError(f"trace: there is no folder {self.trace.parent}")
        if self.trace is not None and self.trace.is_dir():
            raise ValueError(f"trace must be a file, got the folder {self.trace}")
        memory = host_memory() / 2**30
        if not 0 <= self.swap_space <= memory:
            raise ValueError(
                f"swap_space must be from 0 to this machine's {memory:.1f} GiB, "
                f"got {self.swap_space}"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), "
                f"got {self.max_num_batched_tokens}"
            )

    def context(self, config: ModelConfig) -> int:
        """The most tokens of a sequence of this model."""
        if self.max_model_len is None:
            return config.max_position
        if self.max_model_len > config.max_position:
            raise ValueError(
                f"max_model_len must be at most the model's max_position_embeddings "
                f"({config.max_position}), got {self.max_model_len}"
            )
        return self.max_model_len


def check_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
