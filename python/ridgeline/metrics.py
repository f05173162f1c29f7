"""What the loop measures: times of requests, rates and shares of the roofs by phase."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from ridgeline._C import engine
from ridgeline.outputs import RequestOutput, Stats

_KEPT = 4096  # the latest samples of each percentile


def percentile(values: Collection[float], share: float) -> float | None:
    """The smallest value with at least this share of the values up to it."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@dataclass
class Phase:
    """Sums over steps: those with prompt tokens are prefill, whatever decodes beside them."""

    tokens: int = 0
    seconds: float = 0.0
    read_seconds: float = 0.0  # at the roof's bandwidth
    compute_seconds: float = 0.0  # at the roof's rate

    @property
    def rate(self) -> float | None:
        """Tokens a second: of prompts in prefill, of outputs in decode."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def mfu(self) -> float | None:
        return self._share(self.compute_seconds)

    @property
    def mbu(self) -> float | None:
        return self._share(self.read_seconds)

    def _share(self, seconds: float) -> float | None:
        return seconds / self.seconds if self.seconds and seconds else None


class Meter:
    """Adds up steps and requests; a few additions a step."""

    def __init__(self) -> None:
        self.prefill, self.decode = Phase(), Phase()
        self.ttft: deque[float] = deque(maxlen=_KEPT)
        self.inter_token: deque[float] = deque(maxlen=_KEPT)

    def step(self, batch: engine.Batch, seconds: float) -> None:
        prompt_tokens = batch.num_tokens - batch.num_decode_tokens
        phase = self.prefill if prompt_tokens else self.decode
        phase.tokens += prompt_tokens or batch.num_decode_tokens
        phase.seconds += seconds
        phase.read_seconds += batch.read_us / 1e6
        phase.compute_seconds += batch.compute_us / 1e6

    def request(self, output: RequestOutput) -> None:
        metrics = output.metrics
        if metrics.ttft is not None:
            self.ttft.append(metrics.ttft)
        self.inter_token.extend(metrics.inter_token)

    def values(self) -> dict[str, float | None]:
        """The fields of ``Stats`` that are measured here."""
        shares = {"p50": 0.5, "p99": 0.99}
        times = {"ttft": self.ttft, "inter_token": self.inter_token}
        phases = {"prefill": self.prefill, "decode": self.decode}
        return {
            f"{name}_{end}": percentile(values, share)
            for name, values in times.items()
            for end, share in shares.items()
        } | {
            f"{name}_{what}": getattr(phase, what)
            for name, phase in phases.items()
            for what in ("rate", "mfu", "mbu")
        }


def stats(counts: engine.Stats, meter: Meter, graph_counts: tuple[int, int]) -> Stats:
    """``graph_counts``: graphs captured, and steps that replayed one."""
    graphs, replays = graph_counts
    measured: dict[str, Any] = {
        "kv_occupancy": counts.used_blocks / counts.total_blocks,
        "prefix_hit_rate": counts.prefix_hit_tokens / max(counts.prefix_query_tokens, 1),
        "graphs": graphs,
        "graph_replays": replays,
        **meter.values(),
    }
    names = [field.name for field in fields(Stats) if field.name not in measured]
    return Stats(**{name: getattr(counts, name) for name in names}, **measured)
