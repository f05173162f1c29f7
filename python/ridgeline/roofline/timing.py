"""The one timer: graph replay on a GPU, cold caches by rotating buffers, median and spread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

COLD_BYTES = 256 << 20  # more than four times the largest L2: a buffer is evicted before its turn
_MOST_SETS = 64
_WARM_SECONDS = 0.02  # of untimed replays: about so long the clock of an idle GPU rises


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median and the 10th and 90th percentile over replays.

    ``cold`` tells whether the rotated inputs exceed the caches, so that each call reads memory.
    """

    us: float
    us_p10: float
    us_p90: float
    cold: bool


def _summary(samples: Sequence[float], cold: bool) -> Timing:
    ordered = sorted(samples)
    median, p10, p90 = (ordered[round(q * (len(ordered) - 1))] for q in (0.5, 0.1, 0.9))
    return Timing(median, p10, p90, cold)


def _set_bytes(inputs: Sequence[Any]) -> int:
    tensors = [v for v in inputs if isinstance(v, Tensor)]
    return sum(t.untyped_storage().nbytes() for t in tensors)


def input_sets(
    make: Callable[[], Sequence[Any]], touched: int | None = None, least: int = 2
) -> tuple[list[Sequence[Any]], bool]:
    """Input sets to rotate through, and whether what calls touch of them exceeds the caches."""
    sets = [make()]
    size = max(1, _set_bytes(sets[0]))
    count = max(least, min(_MOST_SETS, -(-COLD_BYTES // size)))
    sets += [make() for _ in range(count - 1)]
    return sets, count * (size if touched is None else min(size, touched)) >= COLD_BYTES


def device_or_default(device: str | torch.device | None) -> torch.device:
    """None: the GPU where PyTorch sees one, else the CPU."""
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def time_call(
    make: Callable[[], Sequence[Any]],
    call: Callable[..., Any],
    *,
    launches: int = 20,
    replays: int = 15,
    device: str | torch.device | None = None,
    touched: int | None = None,
) -> Timing:
    """Times ``call(*make())``; arguments as in :func:`time_calls`."""
    return time_calls(
        make, [call], launches=launches, replays=replays, device=device, touched=touched
    )[0]


def time_calls(
    make: Callable[[], Sequence[Any]],
    calls: Sequence[Callable[..., Any]],
    *,
    launches: int = 20,
    replays: int = 15,
    device: str | torch.device | None = None,
    touched: int | None = None,
    least_sets: int = 2,
) -> list[Timing]:
    """Times each ``call(*make())``, by turns: a clock that falls while it measures falls for all.

    Args:
        make: makes one fresh set of inputs; called until the sets exceed the caches.
        calls: the work; on a GPU it is captured, so it must not synchronise.
        launches: calls in one graph (raised to the number of input sets).
        replays: timed replays after untimed ones; CPU: timed calls.
        device: "cuda" times by events around graph replays, "cpu" by the wall clock; None: the
            first where PyTorch sees a GPU, else the second.
        touched: bytes of its inputs that a call reads or writes; None: all.
        least_sets: input sets at the least, for sets that touch parts of the same tensors.
    """
    sets, cold = input_sets(make, touched, least_sets)
    if device_or_default(device).type == "cpu":
        return [_summary(_cpu_samples(sets, call, replays), cold) for call in calls]
    samples = _graph_samples(sets, calls, max(launches, len(sets)), replays)
    return [_summary(of_one, cold) for of_one in samples]


def _cpu_samples(sets: list[Sequence[Any]], call: Callable[..., Any], replays: int) -> list[float]:
    samples = []
    for i in range(replays + 2):
        inputs = sets[i % len(sets)]
        start = time.perf_counter()
        call(*inputs)
        samples.append((time.perf_counter() - start) * 1e6)
    return samples[2:]


def _graph_samples(
    sets: list[Sequence[Any]], calls: Sequence[Callable[..., Any]], launches: int, replays: int
) -> list[list[float]]:
    graphs = [_capture(sets, call, launches) for call in calls]
    begin = time.perf_counter()
    while time.perf_counter() - begin < _WARM_SECONDS:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(replays):
        for graph, of_one in zip(graphs, samples, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            of_one.append(start.elapsed_time(end) * 1e3 / launches)
    return samples


def _capture(
    sets: list[Sequence[Any]], call: Callable[..., Any], launches: int
) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which fills the inputs
    with torch.cuda.stream(stream):
        for inputs in sets[:2]:
            call(*inputs)  # warm up: module load, workspace, library handles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            call(*sets[i % len(sets)])
    return graph
