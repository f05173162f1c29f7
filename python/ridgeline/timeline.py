"""A replayed trace as a picture: a lane for each request, as text or SVG."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

from ridgeline._C import engine
from ridgeline.trace import Replay

_WAITS, _PREFILLS, _DECODES, _PREEMPTED, _SWAPPED = ".", "#", "=", "x", "~"
_COLORS = {
    _WAITS: "#d9d9d9", _PREFILLS: "#e6842a", _DECODES: "#3b7dd8", _PREEMPTED: "#c0392b",
    _SWAPPED: "#8e44ad",
}  # fmt: skip
_NAMES = {
    _WAITS: "waits", _PREFILLS: "prefill", _DECODES: "decode", _PREEMPTED: "preempted",
    _SWAPPED: "on the host",
}  # fmt: skip


@dataclass
class Lane:
    """One request; ``states`` from step ``first`` on, a letter a step."""

    request_id: str
    prompt: int
    first: int
    states: list[str] = field(default_factory=list)


@dataclass
class Timeline:
    """What a trace held, gathered while it was replayed.

    Attributes:
        measured, predicted: microseconds by step; occupancy: the share of blocks in use.
        reasons: how often each decision was made.
    """

    machine: str
    lanes: list[Lane]
    measured: dict[int, float]
    predicted: dict[int, float]
    occupancy: list[float]
    reasons: Counter[str]
    hit_rate: float

    @classmethod
    def of(cls, replay: Replay) -> Timeline:
        """Replays the whole trace."""
        lanes: list[Lane] = []
        lane_of: dict[int, Lane] = {}
        waits: dict[int, str] = {}  # what a sequence that is not computed is shown as
        line = cls(replay.machine, lanes, {}, {}, [], Counter(), 0.0)
        for event, batch in replay.events():
            name = event["event"]
            if name == "added":
                lane = Lane(event["request_id"], len(event["prompt"]), len(line.occupancy))
                lanes.append(lane)
                lane_of.update(dict.fromkeys(event["seq_ids"], lane))
                waits.update(dict.fromkeys(event["seq_ids"], _WAITS))
            elif name == "schedule" and batch is not None:
                line._step(replay, batch, lane_of, waits)
            elif name == "ran":
                line.measured[event["step"]] = event["us"]
                line.predicted[event["step"]] = event["predicted_us"]
            elif "index" in event:
                line.reasons[name] += 1
                line._decided(event, lane_of, waits)
        stats = replay.scheduler.stats()
        line.hit_rate = stats.prefix_hit_tokens / max(stats.prefix_query_tokens, 1)
        return line

    def _decided(
        self, event: dict[str, Any], lane_of: dict[int, Lane], waits: dict[int, str]
    ) -> None:
        name, seq_id = event["event"], event["seq_id"]
        if name == "finished":
            waits.pop(seq_id, None)
            lane_of.pop(seq_id, None)
        elif name in ("preempted", "swapped_out") and seq_id in waits:
            waits[seq_id] = _PREEMPTED if name == "preempted" else _SWAPPED

    def _step(
        self,
        replay: Replay,
        batch: engine.Batch,
        lane_of: dict[int, Lane],
        waits: dict[int, str],
    ) -> None:
        stats = replay.scheduler.stats()
        self.occupancy.append(stats.used_blocks / stats.total_blocks)
        offsets, words = batch.arena().offsets, memoryview(batch.arena()).cast("B").cast("i")
        begin, count = offsets["cu_q"]
        starts = words[begin : begin + count].tolist()
        shown: dict[int, str] = {}
        for seq_id, tokens in zip(batch.seq_ids, map(int.__sub__, starts[1:], starts)):
            shown[seq_id] = _DECODES if tokens == 1 else _PREFILLS
        states: dict[int, str] = {}
        order = _WAITS + _PREEMPTED + _SWAPPED + _DECODES + _PREFILLS
        for seq_id, lane in lane_of.items():
            state = shown.get(seq_id, waits.get(seq_id, _WAITS))
            best = states.get(id(lane), _WAITS)
            states[id(lane)] = max(state, best, key=order.index)
        for lane in _unique(lane_of):
            lane.states.append(states[id(lane)])

    def text(self, *, width: int = 100, lanes: int = 40) -> str:
        """Lanes of at most ``width`` columns, then the counts of decisions and the step times."""
        for name, value, least in (("width", width, 1), ("lanes", lanes, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        steps = len(self.occupancy)
        per = max(1, -(-steps // width))
        rows = [f"{steps} steps, {len(self.lanes)} requests, {per} steps a column, {self.machine}"]
        rows.append("  ".join(f"{letter} {name}" for letter, name in _NAMES.items()))
        for lane in self.lanes[:lanes]:
            columns = " " * (lane.first // per) + _columns(lane, per)
            rows.append(f"{lane.request_id:>6} {lane.prompt:>6} {columns}")
        if len(self.lanes) > lanes:
            rows.append(f"       … {len(self.lanes) - lanes} more")
        rows.append("decisions: " + ", ".join(f"{k} {n}" for k, n in sorted(self.reasons.items())))
        rows.append(
            f"prefix hits: {self.hit_rate:.1%} of prompt tokens; "
            f"blocks in use: at most {max(self.occupancy, default=0):.1%}"
        )
        measured, predicted = sum(self.measured.values()), sum(self.predicted.values())
        if measured:
            rows.append(
                f"time of steps: {measured / 1e3:.2f} ms, by roofline at least "
                f"{predicted / 1e3:.2f} ms ({predicted / measured:.1%})"
            )
        return "\n".join(rows)

    def svg(self, *, lanes: int = 200) -> str:
        """The same as a picture: above, time of steps and its prediction, and blocks in use."""
        steps, shown = max(len(self.occupancy), 1), self.lanes[:lanes]
        scale, top, height = min(10.0, 1400 / steps), 130, 10
        width, bottom = 90 + steps * scale, top + height * len(shown) + 30
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom}" '
            'font-family="sans-serif" font-size="9">',
            f'<text x="4" y="12">{escape(self.machine)}: {steps} steps, '
            f"{len(self.lanes)} requests</text>",
        ]
        largest = max([*self.measured.values(), *self.predicted.values(), 1e-9])
        for name, values, color in (
            ("measured", self.measured, "#222222"), ("roofline", self.predicted, "#2ca02c"),
            ("blocks", {i: o * largest for i, o in enumerate(self.occupancy)}, "#f0b0b0"),
        ):  # fmt: skip
            points = " ".join(
                f"{80 + (i + 0.5) * scale:.1f},{100 - 70 * v / largest:.1f}"
                for i, v in sorted(values.items())
            )
            out.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
            at = {"measured": 40, "roofline": 55, "blocks": 70}[name]
            out.append(f'<text x="4" y="{at}" fill="{color}">{name}</text>')
        out.append(f'<text x="4" y="100">max {largest:.0f} us</text>')
        for row, lane in enumerate(shown):
            y = top + row * height
            out.append(f'<text x="4" y="{y + 8}">{escape(lane.request_id)}</text>')
            for first, count, state in _runs(lane):
                out.append(
                    f'<rect x="{80 + first * scale:.1f}" y="{y}" width="{count * scale:.1f}" '
                    f'height="{height - 2}" fill="{_COLORS[state]}"/>'
                )
        for i, (letter, name) in enumerate(_NAMES.items()):
            x = 80 + 90 * i
            out.append(f'<rect x="{x}" y="{bottom - 16}" width="9" height="9" '
                       f'fill="{_COLORS[letter]}"/>')  # fmt: skip
            out.append(f'<text x="{x + 13}" y="{bottom - 8}">{name}</text>')
        return "\n".join([*out, "</svg>"])


def _unique(lane_of: dict[int, Lane]) -> list[Lane]:
    return list({id(lane): lane for lane in lane_of.values()}.values())


def _columns(lane: Lane, per: int) -> str:
    """The most frequent state of each column's steps."""
    cells = (lane.states[i : i + per] for i in range(0, len(lane.states), per))
    return "".join(Counter(cell).most_common(1)[0][0] for cell in cells)


def _runs(lane: Lane) -> list[tuple[int, int, str]]:
    runs: list[tuple[int, int, str]] = []
    for i, state in enumerate(lane.states):
        if runs and runs[-1][2] == state:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, state)
        else:
            runs.append((lane.first + i, 1, state))
    return runs
