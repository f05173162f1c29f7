"""Roofs without a long measurement: what is published of a GPU, a quick look at a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from ridgeline.roofline.machine import Roofs, device_name

_LAUNCH_US = 2.0

# Dense rates and bandwidth of the vendors' data sheets. A name may hold that of a smaller card.
_PUBLISHED = {
    "B200": (7.7e12, {"bf16": 2250e12, "fp8": 4500e12, "int8": 4500e12, "fp32": 75e12}),
    "H200": (4.8e12, {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12, "fp32": 67e12}),
    "H100 PCIe": (2.0e12, {"bf16": 756e12, "fp8": 1513e12, "int8": 1513e12, "fp32": 51e12}),
    "H100": (3.35e12, {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12, "fp32": 67e12}),
    "A100-PCIE-40GB": (1.555e12, {"bf16": 312e12, "int8": 624e12, "fp32": 19.5e12}),
    "A100": (2.0e12, {"bf16": 312e12, "int8": 624e12, "fp32": 19.5e12}),
    "L40S": (0.864e12, {"bf16": 362e12, "fp8": 733e12, "int8": 733e12, "fp32": 91e12}),
    "RTX 4090": (1.008e12, {"bf16": 165e12, "fp8": 330e12, "int8": 660e12, "fp32": 82e12}),
}


@cache
def peaks(device: str) -> Roofs | None:
    """The device's peaks; None for a GPU that is not in the list."""
    if torch.device(device).type == "cpu":
        return _look_at_cpu()
    name = device_name(device)
    found = next((values for key, values in _PUBLISHED.items() if key in name), None)
    if found is None:
        return None
    bandwidth, flops = found
    return Roofs(name, bandwidth, bandwidth, flops, _LAUNCH_US)


def _look_at_cpu() -> Roofs:
    """The best of some reads of 32 MB and products of 256 x 256, 50 ms, times the threads: right
    within a half. By one thread, since two that share a busy machine wait for each other: 0.9
    GFLOP/s instead of 190."""
    threads = torch.get_num_threads()
    data, square = torch.ones(8 << 20), torch.ones(256, 256)
    torch.set_num_threads(1)
    try:
        read = threads * 4 * data.numel() / _best(data.sum)
        rate = threads * 2 * 256**3 / _best(lambda: square @ square)
    finally:
        torch.set_num_threads(threads)
    return Roofs(device_name("cpu"), read, read, {"fp32": rate}, _LAUNCH_US)


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
