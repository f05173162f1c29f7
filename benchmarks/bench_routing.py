"""Tokens on their way to experts and back, beside the same in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.roofline import op_cost
from row_ops import name_of
from timer import Bench, compiled

# Experts, chosen by a token, elements of a row: Mixtral's and Qwen3-30B-A3B's.
SHAPES = [(8, 2, 4096), (128, 8, 2048)]
TOKENS = [1, 8, 64, 256, 1024, 8192]


def torch_route(logits: Tensor, per_token: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    top, chosen = logits.float().topk(per_token, -1)
    return top.softmax(-1), *torch_order(chosen, logits.shape[1])


def torch_order(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    bounds = torch.arange(experts + 1, device=chosen.device)
    offsets = torch.searchsorted(flat[order], bounds, out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=chosen.device)
    return offsets, (order // chosen.shape[1]).int(), places.view_as(chosen)


def torch_combine(x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return (x[places].float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def rivals(bench: Bench, call: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The call as it is and, where that is worth its while, compiled for one shape."""
    if bench.quick or bench.device == "cpu":
        return {"torch_eager": call}
    torch._dynamo.reset()
    return {"torch_eager": call, "torch_compile": compiled(call)}


def route(bench: Bench, tokens: int, experts: int, per_token: int, dtype: torch.dtype) -> None:
    def make() -> tuple[Tensor]:
        return (torch.randn(tokens, experts, device=bench.device, dtype=dtype),)

    ours = {"ridgeline": lambda logits: ops.route_experts(logits, per_token)}
    bench.compare(
        op="route_experts",
        calls=ours | rivals(bench, lambda logits: torch_route(logits, per_token)),
        make=make,
        cost=op_cost("route_experts", *make(), per_token),
        fields={"dtype": name_of(dtype), "tokens": tokens, "experts": experts, "chosen": per_token},
    )


def order(bench: Bench, tokens: int, experts: int, per_token: int) -> None:
    """Of choices as torch.topk leaves them."""

    def make() -> tuple[Tensor]:
        return (torch.rand(tokens, experts, device=bench.device).topk(per_token, -1).indices,)

    ours = {"ridgeline": lambda chosen: ops.order_experts(chosen, experts)}
    bench.compare(
        op="order_experts",
        calls=ours | rivals(bench, lambda chosen: torch_order(chosen, experts)),
        make=make,
        cost=op_cost("order_experts", *make(), experts),
        fields={"dtype": "int64", "tokens": tokens, "experts": experts, "chosen": per_token},
    )


def combine(
    bench: Bench, tokens: int, experts: int, per_token: int, width: int, dtype: torch.dtype
) -> None:
    def make() -> list[Any]:
        logits = torch.randn(tokens, experts, device=bench.device)
        weights, _, rows, places = ops.route_experts(logits, per_token)
        return [torch.randn(len(rows), width, device=bench.device, dtype=dtype), places, weights]

    bench.compare(
        op="combine_experts",
        calls={"ridgeline": ops.combine_experts} | rivals(bench, torch_combine),
        make=make,
        cost=op_cost("combine_experts", *make()),
        fields={"dtype": name_of(dtype), "tokens": tokens, "chosen": per_token, "cols": width},
    )


def main() -> None:
    bench = Bench.from_args(__doc__)
    dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
    numbers = [1, 64, 8192] if bench.quick else TOKENS
    if bench.device == "cpu":
        numbers = [1, 64]
    for experts, per_token, width in SHAPES:
        for tokens in numbers:
            route(bench, tokens, experts, per_token, dtype)
            order(bench, tokens, experts, per_token)
            combine(bench, tokens, experts, per_token, width, dtype)


if __name__ == "__main__":
    main()
