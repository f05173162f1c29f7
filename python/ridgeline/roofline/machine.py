"""What this machine can do, measured: copy and read bandwidth, matrix rates, launch time."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ridgeline.roofline.cost import Cost
from ridgeline.roofline.timing import device_or_default, time_call


@dataclass(frozen=True)
class Roofs:
    """Measured limits of one device.

    Attributes:
        name: of the device.
        copy: bytes a second of a large copy, read and written bytes counted.
        read: bytes a second of a large read.
        flops: operations a second by unit ("fp32", "bf16", "fp8", "int8").
        launch_us: microseconds of the smallest op, launched in a graph behind its like, so that
            the two overlap (CPU: called).
    """

    name: str
    copy: float
    read: float
    flops: dict[str, float]
    launch_us: float

    def floor_us(self, cost: Cost, *, reads_only: bool = False) -> float:
        """The least time of `cost` here: the largest of its bytes, its operations, a launch."""
        return max(self._terms(cost, reads_only).values())

    def bound(self, cost: Cost, *, reads_only: bool = False) -> str:
        """Which of the three sets the floor: "bandwidth", "compute" or "launch"."""
        terms = self._terms(cost, reads_only)
        return max(terms, key=lambda name: terms[name])

    def _terms(self, cost: Cost, reads_only: bool) -> dict[str, float]:
        return {
            "bandwidth": cost.bytes / (self.read if reads_only else self.copy) * 1e6,
            "compute": cost.flops / self.flops.get(cost.unit, self.flops["fp32"]) * 1e6,
            "launch": self.launch_us,
        }


def device_name(device: str | torch.device = "cuda") -> str:
    """The GPU's name, or the CPU's as the system gives it, with its thread count."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()}, {torch.get_num_threads()} threads"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:  # not Linux
        pass
    return platform.processor() or platform.machine()


def measure_roofs(device: str | torch.device | None = None) -> Roofs:
    """Measures the device once a process: about a second on a GPU, a few on a CPU.

    Args:
        device: None: the GPU where PyTorch sees one, else the CPU.
    """
    return _measure(str(device_or_default(device)))


@cache
def _measure(device: str) -> Roofs:
    if torch.device(device).type == "cpu":
        return _measure_cpu()
    copy, read = _bandwidth(device, megabytes=512)
    flops = {
        "fp32": _rate(device, 4096, lambda a, b: a @ b, lambda t: t),
        "bf16": _rate(device, 8192, lambda a, b: a @ b, lambda t: t.bfloat16()),
    }
    if torch.cuda.get_device_capability(device) >= (8, 9):
        flops["fp8"] = _rate(device, 8192, _scaled_mm, lambda t: t.to(torch.float8_e4m3fn))
        flops["int8"] = flops["fp8"]  # as fast by the data sheets; torch's product of int8 is not
    launch = time_call(lambda: (torch.zeros(1, 8, device=device),), _sum_of_rows, launches=200).us
    return Roofs(device_name(device), copy, read, flops, launch)


def _measure_cpu() -> Roofs:
    copy, read = _bandwidth("cpu", megabytes=128)
    rate = _rate("cpu", 1024, lambda a, b: a @ b, lambda t: t)
    launch = time_call(lambda: (torch.zeros(1, 8),), _sum_of_rows, replays=200, device="cpu").us
    return Roofs(device_name("cpu"), copy, read, {"fp32": rate}, launch)


def _bandwidth(device: str, megabytes: int) -> tuple[float, float]:
    count = megabytes << 18  # of four bytes

    def make() -> tuple[Tensor, Tensor]:
        source = torch.randn(count, device=device)
        return source, torch.empty_like(source)

    # A kernel that moves every element: in a graph, copy_ is a node of the slower copy engine.
    copy = time_call(make, lambda source, out: torch.neg(source, out=out), device=device)
    read = time_call(make, lambda source, _: _sum_of_rows(source.view(-1, 8192)), device=device)
    return 8 * count / copy.us * 1e6, 4 * count / read.us * 1e6


def _sum_of_rows(source: Tensor) -> Tensor:
    total: Tensor = torch.ops.ridgeline.row_reduce(source, "sum")
    return total


def _rate(
    device: str,
    size: int,
    multiply: Callable[[Tensor, Tensor], Tensor],
    convert: Callable[[Tensor], Tensor],
) -> float:
    def make() -> tuple[Tensor, Tensor]:
        return tuple(convert(torch.randn(size, size, device=device)) for _ in range(2))  # type: ignore[return-value]

    return 2 * size**3 / time_call(make, multiply, device=device, launches=10).us * 1e6


def _scaled_mm(a: Tensor, b: Tensor) -> Tensor:
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
