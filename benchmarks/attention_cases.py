"""What the benchmarks of attention share: shapes, a layer's paged cache, PyTorch's attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, HIDDEN = 16384, 2048
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64


def sdpa(backend: SDPBackend, causal: bool) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=grouped
            )

    return call


@dataclass(frozen=True)
class Shape:
    """`batch` sequences of `length` keys and `q_len` queries; all begin with the same `shared`
    blocks."""

    batch: int
    length: int
    q_len: int = 1
    kv: torch.dtype = torch.bfloat16
    block: int = BLOCK
    shared: int = 0
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM
    window: int = 0


class Cache:
    """One layer's paged cache, blocks in random order."""

    def __init__(self, device: str, shape: Shape) -> None:
        self.device, self.shape = device, shape
        batch, block, q_len = shape.batch, shape.block, shape.q_len
        count = -(-shape.length // block)
        rows = (batch * count + 1, shape.kv_heads, block, shape.dim)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        kv = dtype if shape.kv == torch.bfloat16 else shape.kv
        self.k, self.v = (
            torch.randn(rows, device=device, dtype=dtype).to(kv).transpose(1, 2) for _ in range(2)
        )
        order = torch.randperm(batch * count, device=device) + 1
        self.tables = order.int().view(batch, count)
        self.tables[:, : shape.shared] = self.tables[0, : shape.shared].clone()
        self.lengths = torch.full((batch,), shape.length, dtype=torch.int32, device=device)
        self.q = torch.randn(batch * q_len, shape.heads, shape.dim, device=device, dtype=dtype)
        self.cu_q = torch.arange(batch + 1, dtype=torch.int32, device=device) * q_len
        self.scales = []
        if kv != dtype:
            scale = torch.full(self.k.shape[:3], 0.5, dtype=torch.bfloat16, device=device)
            self.scales = [scale, scale.clone()]
        if kv == torch.float8_e4m3fn and q_len > 1:  # queries are fp8, too
            self.scales.append(torch.full(self.q.shape[:2], 0.5, device=device))
            self.q = self.q.to(kv)

    def inputs(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.tables, self.lengths, self.cu_q, *self.scales]

    def fields(self) -> dict[str, Any]:
        shape = self.shape
        fields = {"dtype": str(self.q.dtype).removeprefix("torch."), "B": shape.batch,
                  "L": shape.length, "q_len": shape.q_len, "Hq": shape.heads,
                  "Hkv": shape.kv_heads, "D": shape.dim, "block": shape.block,
                  "kv_dtype": str(self.k.dtype).removeprefix("torch.")}  # fmt: skip
        return {**fields, "window": shape.window} if shape.window else fields


def counters_for(sample: Cache) -> Tensor:
    pairs = sample.shape.batch * sample.shape.kv_heads
    return torch.zeros(pairs + 2, dtype=torch.int32, device=sample.device)
