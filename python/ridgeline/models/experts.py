"""The MLP of a mixture of experts: each token goes through a few of many."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ridgeline import ops
from ridgeline.models.expert_linear import ExpertLinear, Fp8ExpertLinear
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
        limit: None: ``silu(gate) * up``. Else ``ops.swiglu_clamped`` with this bound.
    """

    router: DenseLinear
    up: ExpertLinear
    down: ExpertLinear
    per_token: int
    normalized: bool
    limit: float | None

    def __call__(self, x: Tensor) -> Tensor:
        """``[tokens, hidden]``, both."""
        logits = self.router(x)
        routing = ops.route_experts(logits, self.per_token, normalized=self.normalized)
        out = self._products(x, routing.offsets, routing.rows)
        return ops.combine_experts(out, routing.places, routing.weights)

    def _products(self, x: Tensor, offsets: Tensor, rows: Tensor) -> Tensor:
        if self.limit is not None:
            hidden = ops.swiglu_clamped(self.up(x, offsets, rows, None), self.limit)
            return self.down(hidden, offsets, None, None)
        if isinstance(self.up, Fp8ExpertLinear) and isinstance(self.down, Fp8ExpertLinear):
            codes = self.up.codes_for(self.down, x, offsets, rows, "silu_mul")
            if codes is not None:
                return self.down(codes, offsets, None, None)
        return self.down(self.up(x, offsets, rows, "silu_mul"), offsets, None, None)
