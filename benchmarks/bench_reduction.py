"""Reductions of rows, softmax and quantising to 8 bits, beside eager and compiled PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.roofline import op_cost
from row_ops import compare, dtypes, name_of, shapes
from timer import Bench

TORCHS = {
    "sum": torch.sum,
    "max": torch.amax,
    "argmax": torch.argmax,
    "logsumexp": torch.logsumexp,
}


def torch_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def torch_quantize(x: Tensor, granularity: str) -> tuple[Tensor, Tensor]:
    """The plain way; groups and blocks divide the shape."""
    magnitude = x.abs().float()
    if granularity == "tensor":
        scale = magnitude.amax() / 448
        return (x / scale).to(torch.float8_e4m3fn), scale
    if granularity == "row":
        scale = magnitude.amax(-1, keepdim=True) / 448
        return (x / scale).to(torch.float8_e4m3fn), scale
    down = 1 if granularity == "group" else 128
    tiles = (x.shape[0] // down, down, x.shape[1] // 128, 128)
    scale = magnitude.view(tiles).amax((1, 3), keepdim=True) / 448
    return (x.view(tiles) / scale).to(torch.float8_e4m3fn).view(x.shape), scale


def torch_quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().float().amax(-1, keepdim=True) / 127
    return (x / scale).round().to(torch.int8), scale


def reductions(bench: Bench, rows: int, cols: int, dtype: torch.dtype) -> None:
    def make() -> tuple[Tensor]:
        return (torch.randn(rows, cols, device=bench.device, dtype=dtype),)

    (x,) = make()
    fields: dict[str, Any] = {"rows": rows, "cols": cols, "dtype": name_of(dtype)}
    for op, torchs in TORCHS.items():
        compare(
            bench,
            "row_reduce",
            make=make,
            ours=lambda x, op=op: ops.row_reduce(x, op),
            torchs=lambda x, torchs=torchs: torchs(x, -1),
            cost=op_cost("row_reduce", x, op),
            fields={**fields, "op": op},
            reads_only=True,
        )
    compare(
        bench,
        "softmax",
        make=make,
        ours=ops.softmax,
        torchs=torch_softmax,
        cost=op_cost("softmax", x),
        fields=fields,
    )
    for granularity in ("row", "tensor", "group", "block"):
        divides = cols % 128 == 0 and (granularity != "block" or rows % 128 == 0)
        plain = granularity in ("row", "tensor") or divides
        compare(
            bench,
            "quantize_fp8",
            make=make,
            ours=lambda x, g=granularity: ops.quantize_fp8(x, g),
            torchs=(lambda x, g=granularity: torch_quantize(x, g)) if plain else None,
            cost=op_cost("quantize_fp8", x, granularity),
            fields={**fields, "granularity": granularity},
        )
    compare(
        bench,
        "quantize_int8",
        make=make,
        ours=ops.quantize_int8,
        torchs=torch_quantize_int8,
        cost=op_cost("quantize_int8", x),
        fields=fields,
    )


def main() -> None:
    bench = Bench.from_args(__doc__)
    for dtype in dtypes(bench):
        for rows, cols in shapes(bench):
            reductions(bench, rows, cols, dtype)


if __name__ == "__main__":
    main()
