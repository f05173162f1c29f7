"""Attention of prompts: 16k tokens against cuDNN and flash, sequences side by side, and prompts
over a paged cache beside contiguous keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from attention_cases import DIM, HEADS, HIDDEN, KV_HEADS, TOKENS, Cache, Shape, counters_for, sdpa
from ridgeline import ops
from ridgeline.roofline import op_cost
from timer import Bench

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "torch_flash": SDPBackend.FLASH_ATTENTION}


def prefill(bench: Bench, dim: int, length: int, causal: bool) -> None:
    batch, heads = TOKENS // length, HIDDEN // dim
    if bench.device == "cpu":
        batch = 1

    def make() -> list[Tensor]:
        shape = (batch, length, heads, dim)
        dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
        return [torch.randn(shape, device=bench.device, dtype=dtype) for _ in range(3)]

    fields = {"dtype": str(make()[0].dtype).removeprefix("torch."), "B": batch, "Sq": length,
              "Sk": length, "Hq": heads, "Hkv": heads, "D": dim, "causal": causal}  # fmt: skip
    backends = {"torch_eager": SDPBackend.FLASH_ATTENTION} if bench.device == "cpu" else BACKENDS
    calls = {"ridgeline": lambda q, k, v: ops.attention(q, k, v, causal=causal)}
    for impl, backend in backends.items():
        call = sdpa(backend, causal)
        try:
            call(*make())
            calls[impl] = call
        except RuntimeError as error:  # this build of PyTorch lacks it for the shape
            print(f"attention {impl} {fields}: {str(error).splitlines()[0]}")
    cost = op_cost("attention", *make(), causal=causal)
    bench.compare(op="attention", calls=calls, make=make, cost=cost, fields=fields)


def packed(bench: Bench, lengths: list[int], name: str, before: int = 0) -> None:
    """Causal prefill of sequences side by side, grouped heads, `before` keys ahead of each."""
    keys = [length + before for length in lengths]
    ends = [torch.tensor([0, *n]).cumsum(0).int().to(bench.device) for n in (lengths, keys)]
    longest = [max(lengths), max(keys)]

    def make() -> list[Tensor]:
        shapes = [(sum(lengths), HEADS, DIM)] + [(sum(keys), KV_HEADS, DIM)] * 2
        return [torch.randn(s, device=bench.device, dtype=torch.bfloat16) for s in shapes]

    fields = {"dtype": "bfloat16", "B": len(lengths), "Sq": longest[0], "Sk": longest[1],
              "Hq": HEADS, "Hkv": KV_HEADS, "D": DIM, "causal": True, "lengths": name}  # fmt: skip
    bench.measure(
        op="attention_varlen", impl="ridgeline", make=make, fields=fields,
        call=lambda q, k, v: ops.attention_varlen(q, k, v, *ends, *longest),
        cost=op_cost("attention_varlen", *make(), *ends, *longest),
    )  # fmt: skip


def mixed_lengths(total: int) -> list[int]:
    """Lengths from 64 to 8192 with odds of 1 / length, the same in every run."""
    draw = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        length = int(64 * 128.0 ** torch.rand((), generator=draw).item())
        lengths.append(min(length, total - sum(lengths)))
    return lengths


def prompt(bench: Bench, q_len: int, length: int, block: int) -> None:
    """A prompt, or its end, over a paged cache and over contiguous keys, by turns: under the power
    limit points one after the other compare badly."""
    shape = Shape(1, length, q_len, block=block)
    sample = Cache(bench.device, shape)
    counters = counters_for(sample)
    ends = [torch.tensor([0, n], dtype=torch.int32, device=bench.device) for n in (q_len, length)]

    def make() -> list[Tensor]:
        keys = [torch.randn(length, KV_HEADS, DIM, device=bench.device, dtype=sample.q.dtype)
                for _ in range(2)]  # fmt: skip
        return [*Cache(bench.device, shape).inputs(), *keys]

    calls = {
        "ridgeline": lambda *x: ops.paged_attention(*x[:6], max_q=q_len, counters=counters),
        "ridgeline_contiguous": lambda *x: ops.attention_varlen(x[0], *x[6:], *ends, q_len, length),
    }
    bench.compare(
        op="paged_attention", calls=calls, make=make, fields=sample.fields(), reads_only=True,
        cost=op_cost("paged_attention", *sample.inputs()),
    )  # fmt: skip


def main() -> None:
    bench = Bench.from_args(__doc__)
    small = bench.quick or bench.device == "cpu"
    lengths = [512, 1024] if bench.device == "cpu" else [1024, 16384] if small else LENGTHS
    for dim in [128] if small else [64, 128, 256]:
        for causal in (False, True):
            for length in lengths:
                prefill(bench, dim, length, causal)
    if bench.device != "cpu":
        for q_len, block in ((2048, 64), (4096, 64), (4096, 16)):
            prompt(bench, q_len, 4096, block)
        packed(bench, [4096], "one")
        packed(bench, [2048], "one", before=2048)
        packed(bench, [2048] * 16, "uniform")
        packed(bench, mixed_lengths(2 * TOKENS), "mixed")


if __name__ == "__main__":
    main()
