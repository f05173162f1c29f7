"""What an engine takes: bytes by purpose before anything is loaded, and microseconds of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ridgeline.graphs import StepBuffers, mixed_seqs, mixed_tokens
from ridgeline.kv_cache import KVCacheLayout
from ridgeline.models.config import ModelConfig
from ridgeline.models.decoder import Decoder
from ridgeline.models.linear import int4_group, meets_fp8
from ridgeline.models.weights import parameters
from ridgeline.ops.attention import attention_workspace_bytes
from ridgeline.ops.fp4_weight import FP4_GROUP
from ridgeline.roofline.machine import Roofs
from ridgeline.sampler import Sampler

CONTEXT_BYTES = 900 << 20
"""CUDA context, kernels and library handles of one process."""

_HOST_BANDWIDTH = 25e9  # bytes a second between device and pinned memory: PCIe 4, 16 lanes
_QUANTISED = ("qkv", "output", "up", "down")
_QUANTISED_EXPERTS = ("expert_up", "expert_down")  # but for int8
_BY_EIGHT_BITS = {"fp8": _QUANTISED + _QUANTISED_EXPERTS, "int8": _QUANTISED, "w4a8": _QUANTISED}


@dataclass(frozen=True)
class MemoryLine:
    """One purpose. ``taken``: measured after the start; None where it cannot be told apart."""

    name: str
    predicted: int
    taken: int | None = None

    def __str__(self) -> str:
        taken = "" if self.taken is None else f"{self.taken / 2**20:14,.1f}"
        return f"{self.name:<28}{self.predicted / 2**20:14,.1f}{taken}"


@dataclass(frozen=True)
class MemoryPlan:
    """Where a budget goes, and what is left for the cache.

    Attributes:
        lines: all but the cache.
        budget: bytes for everything; None: as much as is wanted, as on a CPU.
    """

    lines: tuple[MemoryLine, ...]
    budget: int | None
    layout: KVCacheLayout
    wanted_blocks: int | None = None

    @property
    def others(self) -> int:
        return sum(line.predicted for line in self.lines)

    def predicted(self, name: str) -> int:
        """Of the line called so; 0 if there is none."""
        return sum(line.predicted for line in self.lines if line.name == name)

    @property
    def num_blocks(self) -> int:
        """Of the cache, the unused block 0 included; may be less than 2: then nothing fits."""
        if self.wanted_blocks is not None:
            return self.wanted_blocks
        assert self.budget is not None
        return max((self.budget - self.others) // self.layout.block_bytes, 0)

    def sequences(self, length: int) -> int:
        """How many sequences of so many tokens the cache holds at once."""
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        return max(self.num_blocks - 1, 0) // -(-length // self.layout.block_size)

    def check(self, host_memory: int | None = None) -> None:
        """ValueError with all lines if not even one block fits, or if cache and step buffers, which
        are allocated whole, exceed ``host_memory``."""
        if self.num_blocks < 2:
            raise ValueError(f"no room for a KV cache:\n{self}")
        whole = self.num_blocks * self.layout.block_bytes + self.predicted("step buffers")
        if host_memory is not None and whole > host_memory:
            raise ValueError(
                "num_blocks and max_num_batched_tokens: KV cache and step buffers must fit into "
                f"this machine's {host_memory >> 20} MiB:\n{self}"
            )

    def __str__(self) -> str:
        cache = MemoryLine("KV cache", self.num_blocks * self.layout.block_bytes)
        rows = [f"{'':<28}{'MiB':>14}", *map(str, self.lines), str(cache)]
        if self.budget is not None:
            rows.append(str(MemoryLine("budget", self.budget)))
        return "\n".join(rows)


def plan_memory(
    config: ModelConfig,
    layout: KVCacheLayout,
    dtype: torch.dtype,
    *,
    quantization: str | None,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    budget: int | None,
    num_blocks: int | None,
    on_gpu: bool,
    graphs: bool,
    stored_weights: int = 0,
) -> MemoryPlan:
    """The plan; nothing is allocated. ``stored_weights``: bytes of weights that are quantised in
    their files, 0: they are not."""
    size = dtype.itemsize
    blocks = -(-max_model_len // layout.block_size)
    buffers = 4 * StepBuffers.words(
        max_num_seqs=max_num_seqs,
        max_blocks_per_seq=blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        extra=Sampler.words(max_num_batched_tokens + max_num_seqs),
    )

    def workspace(seqs: int, max_q: int) -> int:
        if not on_gpu or size > 2:  # float32 runs on the CPU
            return 0
        return attention_workspace_bytes(
            seqs, config.num_heads, config.num_kv_heads, config.head_dim, max_q,
            blocks * layout.block_size, layout.dtype.itemsize,
        )  # fmt: skip

    lines = [
        MemoryLine("weights", stored_weights or weight_bytes(config, dtype, quantization)),
        MemoryLine("rotary tables", _rotary_bytes(config, max_model_len)),
        MemoryLine("step buffers", buffers),
        MemoryLine("activations of prefill",
                   _activations(config, size, max_num_batched_tokens, max_num_seqs,
                                workspace(max_num_seqs, max_num_batched_tokens))),
    ]  # fmt: skip
    if on_gpu:
        decode = _activations(config, size, max_num_seqs, max_num_seqs, workspace(max_num_seqs, 1))
        tokens, seqs = mixed_tokens(max_num_batched_tokens)[-1], mixed_seqs(max_num_seqs)[-1]
        mixed = _activations(config, size, tokens, seqs, workspace(seqs + 1, tokens))
        lines.append(MemoryLine("graph pool", max(decode, mixed) * graphs))
        lines.append(MemoryLine("context and kernels", CONTEXT_BYTES))
    return MemoryPlan(tuple(lines), budget, layout, num_blocks)


def stored_bytes(
    config: ModelConfig, folder: Path, dtype: torch.dtype, quantization: str | None = None
) -> int:
    """Of weights that are quantised in a folder's safetensors, as they are kept; 0 if they are not
    quantised."""
    kept = None if config.stored_format is None else config.stored_format.kept_as
    if kept is not None:
        kinds = _QUANTISED_EXPERTS if kept == "fp4" else None  # only experts are in such files
        if kept == "fp4" and (dtype == torch.float16 or quantization == "fp8"):
            kept = "fp8"
        return weight_bytes(config, dtype, None if kept == "dtype" else kept, kinds)
    if config.stored_format is None:
        return 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def weight_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: str | None,
    kinds: tuple[str, ...] | None = None,
) -> int:
    """``kinds``: as of :func:`_stored`."""
    return sum(_stored(p.name, p.shape, dtype, quantization, kinds) for p in parameters(config))


def _stored(
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quantization: str | None,
    kinds: tuple[str, ...] | None = None,
) -> int:
    """``kinds``: of the matrices quantised; None: those that ``quantization`` serves."""
    if kinds is None:
        kinds = _QUANTISED + (() if quantization == "int8" else _QUANTISED_EXPERTS)
    *_, kind, end = name.split(".")
    count = prod(shape)
    if quantization is None or end != "weight" or kind not in kinds or len(shape) != 2:
        return count * dtype.itemsize
    if quantization in ("fp8", "int8"):
        return count + 4 * shape[0]
    if quantization == "fp4":
        return count // 2 + count // FP4_GROUP
    return count // 2 + count // int4_group(shape[1]) * dtype.itemsize


def _unit(name: str, columns: int, quantization: str | None) -> str:
    """Who multiplies by a layer's matrix that is quantised while loading."""
    if quantization is None or name.split(".")[-2] not in _BY_EIGHT_BITS.get(quantization, ()):
        return "bf16"
    if quantization == "w4a8":
        return "fp8" if meets_fp8(int4_group(columns), columns) else "bf16"
    return quantization


def _rotary_bytes(config: ModelConfig, max_model_len: int) -> int:
    ropes = {layer.rope for layer in config.layers if layer.rope is not None}
    return len(ropes) * max_model_len * config.head_dim * 4


def _activations(config: ModelConfig, size: int, tokens: int, rows: int, workspace: int) -> int:
    """The most that lives at once: in attention, in the MLP, or with the logits."""
    hidden = config.hidden_size
    query = config.num_heads * config.head_dim
    qkv = query + 2 * config.num_kv_heads * config.head_dim
    inner = config.intermediate_size * (3 if config.spec.gated else 1)
    inner *= max(config.experts_per_token, 1)
    attention = tokens * size * (2 * hidden + qkv + query) + workspace
    mlp = tokens * size * (3 * hidden + inner)
    logits = tokens * hidden * size * 2 + rows * config.vocab_size * (size + 4)
    return max(attention, mlp, logits)


def kept_weights(decoder: Decoder) -> tuple[float, str]:
    """Of the layers' matrices as they are kept: the bytes that a step of one token reads, and the
    unit that multiplies."""
    config, read = decoder.config, 0.0
    for layer in decoder.layers:
        read += tensor_bytes([layer.qkv, layer.output, layer.up, layer.down])
        if layer.experts is not None:
            share = config.experts_per_token / config.num_experts
            read += share * tensor_bytes([layer.experts.up, layer.experts.down])
    first = decoder.layers[0]
    up = first.up if first.experts is None else first.experts.up
    assert up is not None
    return read, up.unit


def step_cost(
    config: ModelConfig,
    layout: KVCacheLayout,
    dtype: torch.dtype,
    quantization: str | None,
    roofs: Roofs | None,
    *,
    kept: tuple[float, str] | None = None,
) -> dict[str, Any]:
    """The arguments of ``engine.StepCost`` on a machine with these roofs; empty: not known.

    ``kept``: of :func:`kept_weights`; None: as ``dtype`` and ``quantization`` make them.
    """
    if roofs is None:
        return {}
    head = config.vocab_size * config.hidden_size
    plain = roofs.flops.get("bf16", roofs.flops["fp32"])
    token, read = 0.0, 0.0  # seconds of a token's products, and bytes
    for parameter in parameters(config):
        if len(parameter.shape) == 2 and parameter.name.startswith("layers."):
            # Of experts a token needs few, and a step reads at least those of one token.
            experts = ".expert_" in parameter.name
            share = config.experts_per_token / config.num_experts if experts else 1.0
            if kept is None:
                unit = _unit(parameter.name, parameter.shape[1], quantization)
                read += share * _stored(parameter.name, parameter.shape, dtype, quantization)
            else:
                read, unit = kept
            token += 2 * share * prod(parameter.shape) / roofs.flops.get(unit, plain)
    row = layout.block_bytes / layout.block_size / layout.num_layers
    windows = Counter(layer.window or 0 for layer in config.layers)
    return {
        "fixed_us": (read + head * dtype.itemsize) / roofs.read * 1e6,
        "token_us": token * 1e6,
        "row_us": 2 * head / plain * 1e6,
        "swap_us": layout.block_bytes / _HOST_BANDWIDTH * 1e6,
        "attention": [
            (
                window,
                layers * row / roofs.read * 1e6,
                layers * 4 * config.num_heads * config.head_dim / plain * 1e6,
            )
            for window, layers in sorted(windows.items())
        ],
    }


def tensor_bytes(values: Iterable[object]) -> int:
    """Bytes of the distinct storages of the tensors in ``values``, lists and dataclasses."""
    seen: dict[int, int] = {}
    todo: list[object] = list(values)
    visited: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, (list, tuple)):
            todo += value
        elif is_dataclass(value) and not isinstance(value, type):
            todo += vars(value).values()
    return sum(seen.values())
