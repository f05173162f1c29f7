"""What a cold read takes here: kernels that do nothing but read as many bytes, measured."""

from __future__ import annotations

from bisect import bisect_left
from functools import cache

import torch
from torch import Tensor

from ridgeline import ops
from ridgeline.roofline.timing import COLD_BYTES, time_calls

SIZES = [1 << 20, 1 << 21, 1 << 22, 1 << 23, 1 << 24, 1 << 25, 1 << 26, 1 << 27, 1 << 29]
ROW_BYTES = [4096, 8192, 16384, 32768]  # how the same bytes are dealt out: the fastest counts


def read_us(device: str, count: float) -> float:
    """Microseconds of a cold read of `count` bytes in a graph, interpolated between `SIZES`."""
    times = _times(device)
    after = min(max(1, bisect_left(SIZES, count)), len(SIZES) - 1)
    (a, b), (start, end) = SIZES[after - 1 : after + 1], times[after - 1 : after + 1]
    return max(times[0], start + (end - start) * (count - a) / (b - a))


@cache
def _times(device: str) -> list[float]:
    return [_time(device, size) for size in SIZES]


def _time(device: str, size: int) -> float:
    def make() -> tuple[Tensor]:
        return (torch.randn(size // 2, device=device, dtype=torch.bfloat16),)

    calls = [lambda x, c=row // 2: ops.row_reduce(x.view(-1, c), "sum") for row in ROW_BYTES]
    timings = time_calls(make, calls, device=device, least_sets=-(-COLD_BYTES // size))
    return min(timing.us for timing in timings)
