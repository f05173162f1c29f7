"""GPTQ: columns are rounded one by one, and those to come make up for what each one lost."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline._quantize.moments import Moments
from ridgeline._quantize.schemes import Grid, Scheme
from ridgeline.quant.stored import GroupedCodes, ScaledCodes

ACT_ORDERS = ("none", "static", "group")
_BLOCK = 128  # columns whose errors reach those beyond in one product
_MOST_DAMPING = 10.0


@dataclass(frozen=True)
class Factor:
    """How the error of a column is spread over those after it; one serves all rows.

    Attributes:
        order: the columns as they are rounded.
        upper: ``[K, K]``, in that order: the inverse of the moments is ``upper^T upper``.
        moments: ``[K, K]``, in that order, undamped.
        act_order: of ``ACT_ORDERS``: what the order is, and what it means for groups of int4.
            "none": the weight's, each scale fixed when its first column comes. "static": columns
            with the largest inputs first; groups are the weight's, their scales fixed ahead.
            "group": groups are of columns in that order, and the codes have a ``group_index``.
    """

    order: Tensor
    upper: Tensor
    moments: Tensor
    act_order: str

    @classmethod
    def of(cls, seen: Moments, *, damping: float, act_order: str) -> Factor:
        """
        Args:
            damping: added to the diagonal, as a share of its mean; ten times as much until the
                factorisation succeeds.

        Raises:
            ValueError: the inputs are not finite.
        """
        assert seen.product is not None
        diagonal = seen.product.diagonal()
        if not bool(torch.isfinite(diagonal).all()):
            raise ValueError("inputs of a product are not finite: no moments to round by")
        K = len(diagonal)
        order, moments = torch.arange(K, device=diagonal.device), seen.product
        if act_order != "none":
            order = torch.argsort(diagonal, descending=True, stable=True)
            moments = seen.product[order[:, None], order]
        unseen = moments.diagonal() == 0  # columns without inputs: rounded to nearest
        while True:
            # One name for each next matrix: the one before it is free once it has been made.
            step = moments.clone()
            mean = float(diagonal.mean())
            step.diagonal().add_(damping * mean).masked_fill_(unseen, mean or 1.0)
            step, failed = torch.linalg.cholesky_ex(step)
            if not int(failed):
                step = torch.cholesky_inverse(step)
                step, failed = torch.linalg.cholesky_ex(step, upper=True)
            if not int(failed):
                return cls(order, step, moments, act_order)
            if damping > _MOST_DAMPING:
                raise ValueError("the moments of a product's inputs cannot be factored")
            damping *= 10


def gptq(
    weight: Tensor, factor: Factor, scheme: Scheme, *, clip: bool = False
) -> GroupedCodes | ScaledCodes:
    """Codes for float32 ``[N, K]`` that keep its product with the inputs seen.

    ``clip``: groups are cut as :meth:`Scheme.grid` does.

    Source: Frantar et al., "GPTQ", 2022.
    """
    order, upper = factor.order, factor.upper
    N, K = weight.shape
    group = scheme.group(K)
    fixed = scheme.format != "int4" or factor.act_order == "static"
    group_of = (order if fixed else torch.arange(K, device=order.device)) // group
    if fixed:
        back = order.argsort()
        grid = scheme.grid(weight, factor.moments[back[:, None], back] if clip else None)
        scales, zeros = grid.scales.t().contiguous(), grid.zeros.t().contiguous()
    else:
        scales = weight.new_empty(K // group, N)
        zeros = torch.empty_like(scales)
    w = weight.t()[order]  # a column of the weight is a row here: it is read and written whole
    codes = torch.empty_like(w)
    groups = group_of.tolist()
    diagonal = upper.diagonal().tolist()
    block = max(_BLOCK // group, 1) * group if group < _BLOCK else _BLOCK
    for low in range(0, K, block):
        high = min(low + block, K)
        lost = torch.empty_like(w[low:high])
        for j in range(low, high):
            g = groups[j]
            if not fixed and j % group == 0:
                own = slice(j, j + group)
                new = scheme.grid(w[own].t(), factor.moments[own, own] if clip else None)
                scales[g], zeros[g] = new.scales[:, 0], new.zeros[:, 0]
            codes[j] = scheme.codes(w[j], scales[g], zeros[g])
            lost[j - low] = (w[j] - (codes[j] - zeros[g]) * scales[g]) / diagonal[j]
            w[j + 1 : high].addr_(upper[j, j + 1 : high], lost[j - low], alpha=-1)
        w[high:].addmm_(upper[low:high, high:].t(), lost, alpha=-1)
    del w
    back = order.argsort()
    index = group_of[back] if factor.act_order == "group" and not fixed else None
    if not fixed:
        grid = Grid(scales.t(), zeros.t())
    return scheme.weight(codes.t()[:, back].contiguous(), grid, index)
