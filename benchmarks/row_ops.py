"""What the benchmarks of row ops share: shapes, and one op beside eager and compiled PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ridgeline.roofline import Cost
from timer import Bench

# At many rows the bus decides, at few the launch; 8200 columns begin off a line of 128 bytes.
MANY = [(8192, 4096), (8192, 8192), (8192, 16384), (8192, 8200)]
FEW = [(rows, cols) for cols in (4096, 8192) for rows in (1, 8, 64)]


# Compiling takes seconds a shape: one where the bus decides, an odd one, and one of launch.
COMPILED = [MANY[0], MANY[3], FEW[0]]


def shapes(bench: Bench) -> list[tuple[int, int]]:
    if bench.device == "cpu":
        return [(1, 4096), (512, 4096)]
    return MANY[:2] + FEW[:1] if bench.quick else MANY + FEW


def dtypes(bench: Bench) -> list[torch.dtype]:
    if bench.device == "cpu":
        return [torch.float32, torch.bfloat16]
    return [torch.bfloat16]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compare(
    bench: Bench,
    op: str,
    *,
    make: Callable[[], Sequence[Any]],
    ours: Callable[..., Any],
    torchs: Callable[..., Any] | None,
    cost: Cost,
    fields: dict[str, Any],
    reads_only: bool = False,
) -> None:
    """Times `ours` and, where PyTorch has the like, `torchs`, eager and compiled, on equal inputs.

    Ours is launched with programmatic dependent launch: its rows are chained.
    """
    shared: dict[str, Any] = {
        "op": op,
        "make": make,
        "cost": cost,
        "fields": fields,
        "reads_only": reads_only,
    }
    bench.measure(impl="ridgeline", call=ours, chained=bench.device != "cpu", **shared)
    if torchs is None:
        return
    bench.measure(impl="torch_eager", call=torchs, **shared)
    if bench.device == "cpu" or bench.quick:
        return  # compiling for the CPU takes longer than all the rest
    if (fields["rows"], fields["cols"]) not in COMPILED:
        return
    torch._dynamo.reset()
    try:
        bench.measure(impl="torch_compile", call=torch.compile(torchs, dynamic=False), **shared)
    except RuntimeError as error:  # where Triton or its compiler is missing
        print(f"{op} torch_compile {fields}: {str(error).splitlines()[0]}")
