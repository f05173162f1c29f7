"""Sampling from logits, beside the usual ways to write it in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.roofline import op_cost
from timer import Bench

KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k_top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
}


def _draw(probabilities: Tensor) -> Tensor:
    """By the exponential race, as vLLM does where it has no kernel for it: no synchronisation."""
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1)


def torch_sampler(kind: str) -> Callable[[Tensor], Tensor]:
    """Sorts where it must: the common formulation."""
    options = KINDS[kind]

    def sample(logits: Tensor) -> Tensor:
        if kind == "greedy":
            return logits.argmax(-1)
        x = logits.float() / options["temperature"]
        if "top_k" in options and "top_p" not in options:
            least = x.topk(int(options["top_k"])).values[:, -1:]
            x = x.masked_fill(x < least, -torch.inf)
        if "top_p" in options:
            x, order = x.sort(dim=-1, descending=True)
            if "top_k" in options:
                x[:, int(options["top_k"]) :] = -torch.inf
            probabilities = x.softmax(-1)
            beyond = probabilities.cumsum(-1) - probabilities >= options["top_p"]
            drawn = _draw(probabilities.masked_fill(beyond, 0.0))
            return order.gather(1, drawn[:, None])[:, 0]
        probabilities = x.softmax(-1)
        if "min_p" in options:
            floor = options["min_p"] * probabilities.amax(-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < floor, 0.0)
        return _draw(probabilities)

    return sample


def maker(bench: Bench, rows: int, vocab: int, dtype: torch.dtype, kind: str) -> Callable[[], Any]:
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | KINDS[kind]

    def make() -> list[Tensor]:
        logits = torch.randn(rows, vocab, device=bench.device).to(dtype)
        inputs = [logits]
        for name, value in options.items():
            of = torch.int32 if name == "top_k" else torch.float32
            inputs.append(torch.full((rows,), value, dtype=of, device=bench.device))
        inputs.append(torch.arange(rows, device=bench.device))
        inputs.append(torch.arange(rows, dtype=torch.int32, device=bench.device))
        return inputs

    return make


def main() -> None:
    bench = Bench.from_args(__doc__)
    for vocab in (128256,) if bench.quick else (4096, 32000, 128256, 262144):
        for rows in (1, 128) if bench.quick else (1, 8, 32, 128):
            for kind in KINDS:
                make = maker(bench, rows, vocab, torch.float32, kind)
                torch_impl = torch_sampler(kind)
                calls = {
                    "ridgeline": ops.sample,
                    "torch_eager": lambda logits, *rest, of=torch_impl: of(logits),
                }
                for impl, call in calls.items():
                    bench.measure(
                        op="sample",
                        impl=impl,
                        make=make,
                        call=call,
                        cost=op_cost("sample", *make()),
                        fields={"rows": rows, "vocab": vocab, "kind": kind, "dtype": "float32"},
                        chained=impl == "ridgeline",
                        reads_only=True,
                    )
            tokens = torch.zeros(rows, dtype=torch.int32, device=bench.device)
            make = maker(bench, rows, vocab, torch.float32, "greedy")
            bench.measure(
                op="top_logprobs",
                impl="ridgeline",
                make=make,
                call=lambda logits, *rest, t=tokens: ops.top_logprobs(logits, t, 5),
                cost=op_cost("top_logprobs", make()[0], tokens, 5),
                fields={"rows": rows, "vocab": vocab, "count": 5, "dtype": "float32"},
                chained=True,
                reads_only=True,
            )


if __name__ == "__main__":
    main()
