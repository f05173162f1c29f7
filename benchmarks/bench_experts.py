"""Products with experts' weights: few tokens against the bus, many against the tensor cores."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline import ops
from ridgeline.roofline.cost import Cost
from timer import Bench

# Experts, chosen by a token, K, N of the first product: Mixtral's and Qwen3-30B-A3B's.
SHAPES = [(8, 2, 4096, 28672), (128, 8, 2048, 1536)]
GROUP = 128  # columns that share a scale of int4
TOKENS = [1, 4, 16, 64, 256, 1024, 8192]


def routing(experts: int, chosen: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Offsets and rows of tokens that choose at random, on the host."""
    draw = torch.Generator().manual_seed(tokens)
    choice = torch.rand(tokens, experts, generator=draw).topk(chosen).indices.flatten()
    order = choice.argsort(stable=True)
    offsets = torch.searchsorted(choice[order], torch.arange(experts + 1), out_int32=True)
    return offsets, (order // chosen).int()


def measure(bench: Bench, experts: int, chosen: int, K: int, N: int, tokens: int) -> None:
    dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
    offsets, rows = (tensor.to(bench.device) for tensor in routing(experts, chosen, tokens))
    bounds = offsets.tolist()
    touched = sum(a < b for a, b in zip(bounds, bounds[1:]))

    def make() -> list[Tensor]:
        x = torch.randn(tokens, K, device=bench.device, dtype=dtype)
        return [x, torch.randn(experts, N, K, device=bench.device, dtype=dtype) * 0.02]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return ops.grouped_linear(x, weight, offsets, rows=rows)

    def grouped_mm(x: Tensor, weight: Tensor) -> Tensor:
        return torch._grouped_mm(x[rows], weight.transpose(1, 2), offs=offsets[1:])

    def one_by_one(x: Tensor, weight: Tensor) -> Tensor:
        gathered = x[rows]
        return torch.cat([
            F.linear(gathered[a:b], weight[e]) for e, (a, b) in enumerate(zip(bounds, bounds[1:]))
        ])  # fmt: skip

    count = tokens * chosen
    element = torch.finfo(dtype).bits // 8
    moved = element * (touched * N * K + tokens * K + count * N)
    unit = "fp32" if bench.device == "cpu" else "bf16"
    cost = Cost(bytes=moved, flops=2 * count * N * K, unit=unit)
    fields: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "tokens": tokens}
    fields |= {"experts": experts, "chosen": chosen, "touched": touched, "K": K, "N": N}
    for impl, call in (("ridgeline", ours), ("torch_grouped_mm", grouped_mm),
                       ("one_by_one", one_by_one)):  # fmt: skip
        try:
            bench.measure(op="grouped_linear", impl=impl, make=make, call=call, cost=cost,
                          fields=fields, reads_only=count <= 64 * touched)  # fmt: skip
        except (RuntimeError, ValueError) as error:
            if impl == "ridgeline":
                raise
            print(f"grouped_linear {impl}: {str(error).splitlines()[0]}")

    def codes(*shape: int) -> Tensor:
        return torch.randn(shape, device=bench.device, dtype=dtype).to(torch.float8_e4m3fn)

    def make_fp8() -> list[Tensor]:
        scales = torch.rand(experts, N, device=bench.device)
        return [codes(tokens, K), codes(experts, N, K), scales, scales.new_ones(tokens)]

    def make_int4() -> list[Tensor]:
        shape = (experts, N // 16, K // 64, 32, 4)
        packed = torch.randint(-(2**31), 2**31, shape, device=bench.device, dtype=torch.int32)
        scales = torch.rand(experts, K // GROUP, N, device=bench.device).to(dtype)
        return [torch.randn(tokens, K, device=bench.device, dtype=dtype), packed, scales]

    def fp8(x: Tensor, weight: Tensor, scale: Tensor, x_scale: Tensor) -> Tensor:
        return ops.grouped_fp8_linear(
            x, weight, scale, offsets, rows=rows, x_scale=x_scale, out_dtype=dtype
        )

    def int4(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        weight = ops.Int4Experts(packed, scales, None, N, K, GROUP)
        return ops.grouped_int4_linear(x, weight, offsets, rows=rows)

    for op, made, op_call, bits, x_bytes in (
        ("grouped_fp8_linear", make_fp8, fp8, 8.0, 1),
        ("grouped_int4_linear", make_int4, int4, 4 + 16 / GROUP, element),
    ):
        moved = int(touched * N * K * bits / 8) + x_bytes * tokens * K + element * count * N
        unit = "fp32" if bench.device == "cpu" else "fp8" if x_bytes == 1 else "bf16"
        cost = Cost(bytes=moved, flops=2 * count * N * K, unit=unit)
        bench.measure(op=op, impl="ridgeline", make=made, call=op_call, cost=cost,
                      fields=fields, reads_only=count <= 64 * touched)  # fmt: skip


def main() -> None:
    bench = Bench.from_args(__doc__)
    shapes, tokens = SHAPES, TOKENS
    if bench.quick:
        tokens = [1, 64, 8192]
    if bench.device == "cpu":
        shapes, tokens = [(8, 2, 512, 1024)], [1, 64]
    for shape in shapes:
        for count in tokens:
            measure(bench, *shape, count)


if __name__ == "__main__":
    main()
