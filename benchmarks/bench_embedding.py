"""The embedding of a step, with ids that are still on the device, beside the same in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ridgeline import ops
from ridgeline.roofline import op_cost
from timer import Bench, compiled

VOCAB = 32768


def torch_embed(ids: Tensor, weight: Tensor, last_tokens: Tensor) -> Tensor:
    last = last_tokens.index_select(0, (-1 - ids).clamp_(min=0))
    return embedding(torch.where(ids < 0, last, ids), weight)


def main() -> None:
    bench = Bench.from_args(__doc__)
    width, vocab = (4096, VOCAB) if bench.device != "cpu" else (512, 4096)
    for tokens in (1, 4096) if bench.quick else (1, 32, 128, 1024, 8192):

        def make(tokens: int = tokens) -> list[Any]:
            ids = torch.randint(-tokens, vocab, (tokens,), dtype=torch.int32)
            weight = torch.randn(vocab, width, device=bench.device, dtype=torch.bfloat16)
            last = torch.randint(0, vocab, (tokens,), dtype=torch.int32)
            return [ids.to(bench.device), weight, last.to(bench.device)]

        rivals = {
            "ridgeline": ops.embed,
            "torch_eager": torch_embed,
            "torch_compile": compiled(torch_embed),
        }
        for impl, call in rivals.items():
            bench.measure(
                op="embed",
                impl=impl,
                make=make,
                call=call,
                cost=op_cost("embed", *make()),
                fields={"tokens": tokens, "width": width, "dtype": "bfloat16"},
                chained=impl == "ridgeline",
            )


if __name__ == "__main__":
    main()
