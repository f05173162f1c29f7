"""The MLP of a mixture of experts: each token goes through a few of many."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.models.expert_linear import ExpertLinear
from ridgeline.models.linear import DenseLinear


@dataclass(frozen=True)
class Experts:
    """``sum_j weight_j * down_j(act(up_j(x)))`` over the experts ``j`` that a token chooses.

    Shapes are static and nothing waits for the device, so that steps can be captured: which experts
    have rows is known on the device alone.

    Attributes:
        router: ``[experts, hidden]``.
        up: ``[2 * inner, hidden]`` each, gate rows first. down: ``[hidden, inner]``.
        per_token: how many experts a token chooses.
        normalized: their weights sum to one.
        limit: None: ``silu(gate) * up``. Else gpt-oss's: both clamped, ``up`` from below too, then
            ``(up + 1) * gate * sigmoid(1.702 * gate)``.
    """

    router: DenseLinear
    up: ExpertLinear
    down: ExpertLinear
    per_token: int
    normalized: bool
    limit: float | None

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]``, both."""
        weights, experts = self._choose(self.router(x))
        # Rows in the order of their experts, where each expert's begin, and the way back.
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        bounds = torch.arange(self.up.experts + 1, device=x.device)
        offsets = torch.searchsorted(flat[order], bounds, out_int32=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        hidden = self._activated(x, offsets, (order // self.per_token).int())
        out = self.down(hidden, offsets, None, None)
        rows = out[back].unflatten(0, (-1, self.per_token))
        return (rows.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 weights and the experts, both ``[tokens, per_token]``."""
        logits = logits.float()
        top, experts = logits.topk(self.per_token, -1)
        if self.normalized:  # what normalising the softmax of all comes to
            return top.softmax(-1), experts
        return logits.softmax(-1).gather(-1, experts), experts

    def _activated(self, x: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
        activation = "silu_mul" if self.limit is None else None
        hidden = self.up(x, offsets, rows, activation)
        if self.limit is None:
            return hidden
        gate, up = hidden.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(1.702 * gate))
