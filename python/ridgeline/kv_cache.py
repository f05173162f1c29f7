"""The paged KV cache: one tensor for K and one for V a layer, and how many blocks there are."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.models.config import ModelConfig

KV_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Quantised caches; "auto" is the model's own dtype."""


@dataclass(frozen=True)
class KVCacheLayout:
    """Size of the cache of one model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls, config: ModelConfig, block_size: int, name: str, dtype: torch.dtype
    ) -> KVCacheLayout:
        """``name``: "auto" (then ``dtype``), "fp8" or "int8"."""
        cache_dtype = dtype if name == "auto" else KV_DTYPES[name]
        return cls(config.num_layers, config.num_kv_heads, config.head_dim, block_size, cache_dtype)

    @property
    def scaled(self) -> bool:
        return self.dtype in KV_DTYPES.values()

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, K and V, scales included."""
        rows = 2 * self.num_layers * self.num_kv_heads * self.block_size
        scale = torch.bfloat16.itemsize if self.scaled else 0
        return rows * (self.head_dim * self.dtype.itemsize + scale)


@dataclass(frozen=True)
class KVCache:
    """Blocks of all layers; block 0 is the dummy that padding points at.

    Attributes:
        k, v: one ``[num_blocks, block_size, kv_heads, head_dim]`` a layer: a transposed view of
            storage in which each block and head is one contiguous piece.
        k_scale, v_scale: one bf16 ``[num_blocks, block_size, kv_heads]`` a layer, or None.
    """

    num_blocks: int
    block_size: int
    k: list[Tensor]
    v: list[Tensor]
    k_scale: list[Tensor] | list[None]
    v_scale: list[Tensor] | list[None]

    @classmethod
    def allocate(cls, layout: KVCacheLayout, num_blocks: int, device: torch.device) -> KVCache:
        def values() -> Tensor:
            shape = (num_blocks, layout.num_kv_heads, layout.block_size, layout.head_dim)
            return torch.empty(shape, dtype=layout.dtype, device=device).transpose(1, 2)

        def scales() -> list[Tensor] | list[None]:
            if not layout.scaled:
                return [None] * layout.num_layers
            shape = (num_blocks, layout.block_size, layout.num_kv_heads)
            return [
                torch.empty(shape, dtype=torch.bfloat16, device=device)
                for _ in range(layout.num_layers)
            ]

        layers = range(layout.num_layers)
        k, v = [values() for _ in layers], [values() for _ in layers]
        return cls(num_blocks, layout.block_size, k, v, scales(), scales())


def blocks_for_cpu(layout: KVCacheLayout, max_model_len: int) -> int:
    """Room for eight sequences of the full length, but at most a quarter of the machine's RAM."""
    wanted = 8 * -(-max_model_len // layout.block_size)
    return 1 + max(1, min(wanted, host_memory() // 4 // layout.block_bytes))


def host_memory() -> int:
    """Bytes of this machine's RAM."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def blocks_for_cuda(
    layout: KVCacheLayout, device: torch.device, utilization: float, activations: int
) -> int:
    """What fits into ``utilization`` of the GPU beside all that is there and ``activations``."""
    torch.cuda.empty_cache()  # what PyTorch holds without need would count as taken
    free, total = torch.cuda.mem_get_info(device)
    available = int(total * utilization) - (total - free) - activations
    blocks = available // layout.block_bytes
    if blocks < 2:
        raise ValueError(
            f"no room for a KV cache: gpu_memory_utilization={utilization} of {total >> 20} MiB "
            f"is {int(total * utilization) >> 20} MiB; {(total - free) >> 20} MiB are in use and "
            f"{activations >> 20} MiB are kept for activations; a block takes "
            f"{layout.block_bytes} bytes"
        )
    return blocks
