"""Self-attention with its projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ridgeline import ops
from ridgeline.nn.kinds import expect_kind
from ridgeline.nn.linear import Linear, Product


class Attention(nn.Module):
    """Self-attention over ``[B, S, dim]``: one product for q, k and v, attention, one more.

    Args:
        qkv: ``[(heads + 2 * kv_heads) * head_dim, dim]``, queries first, then keys and values.
        output: ``[dim, heads * head_dim]``.
        causal, window: of :func:`ridgeline.ops.attention`.
    """

    def __init__(
        self,
        qkv: Product,
        output: Product,
        heads: int,
        kv_heads: int | None = None,
        *,
        causal: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.qkv, self.output = qkv, output
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.causal, self.window = causal, window
        parts = heads + 2 * self.kv_heads
        if qkv.out_features % parts:
            raise ValueError(
                f"qkv: expected a multiple of {parts} rows (heads + 2 * kv_heads), "
                f"got {qkv.out_features}"
            )

    @classmethod
    def from_torch(cls, attention: nn.MultiheadAttention, *, causal: bool = False) -> Attention:
        """Shares the parameters.

        Raises:
            ValueError: ``batch_first`` is false, or it has what the ops do not: keys or values of
                another width, ``bias_k``, ``add_zero_attn``.
        """
        expect_kind("attention", attention, nn.MultiheadAttention)
        if not attention.batch_first:
            raise ValueError("batch_first: expected True (inputs [B, S, dim]), got False")
        if attention.in_proj_weight is None:
            raise ValueError("kdim, vdim: expected those of the queries")
        if attention.bias_k is not None or attention.add_zero_attn:
            raise ValueError("add_bias_kv, add_zero_attn: expected False")
        qkv = nn.Linear(attention.embed_dim, 3 * attention.embed_dim, False, device="meta")
        qkv.weight, qkv.bias = attention.in_proj_weight, attention.in_proj_bias
        out = Linear.from_torch(attention.out_proj)
        return cls(Linear.from_torch(qkv), out, attention.num_heads, causal=causal)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.heads + 2 * self.kv_heads
        heads = self.qkv(x).unflatten(2, (parts, self.qkv.out_features // parts))
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 2)
        out = ops.attention(q, k, v, causal=self.causal, window=self.window)
        assert isinstance(out, torch.Tensor)
        return self.output(out.flatten(2))
