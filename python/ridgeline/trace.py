"""The trace of a scheduler: everything it was told and decided, and its replay without a GPU.

One JSON object a line. ``start`` has the scheduler's settings; ``added``, ``schedule``, ``commit``,
``finish``, ``discard`` and ``time_ratio`` are its calls in order, each followed by the decisions
that it made (lines with an ``index``); ``ran`` has a step's time beside its prediction. A file that
cannot be written any more (a full disk) ends behind its last whole step, with a warning.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ridgeline._C import engine

VERSION = 2


def make_scheduler(settings: dict[str, Any]) -> engine.Scheduler:
    """From the settings of a trace; ``cost`` is that of ``engine.StepCost``."""
    return engine.Scheduler(**settings | {"cost": engine.StepCost(**settings["cost"])})


class Recorder:
    """Writes the calls of one scheduler and what came of them."""

    def __init__(
        self, scheduler: engine.Scheduler, settings: dict[str, Any], path: Path, machine: str
    ) -> None:
        self._scheduler = scheduler
        self._path = path
        self._file = path.open("wb", buffering=0)
        self._size = 0  # of the file, without what a failed write left
        self._lines: list[str] = []  # of the step that is not over
        self._next = 0
        self._line("start", version=VERSION, machine=machine, settings=settings)

    def added(self, request_id: str, **arguments: Any) -> None:
        self._line("added", request_id=request_id, **arguments)
        self._decisions()

    def scheduled(self, now: int, only: Sequence[int], batch: engine.Batch | None) -> None:
        step: dict[str, Any] = {"step": None}
        if batch is not None:
            step = {"step": batch.step, "digest": f"{batch.digest():016x}"}
        self._line("schedule", now=now, only=list(only), **step)
        self._decisions()

    def committed(self, batch: engine.Batch, tokens: list[int]) -> None:
        self._line("commit", step=batch.step, tokens=tokens)
        self._decisions()

    def ran(self, batch: engine.Batch, seconds: float) -> None:
        self._line(
            "ran",
            step=batch.step,
            us=round(seconds * 1e6, 1),
            predicted_us=round(batch.predicted_us, 1),
            tokens=batch.num_tokens,
            decode_tokens=batch.num_decode_tokens,
        )
        self._write()

    def finished(self, seq_id: int, reason: str) -> None:
        self._line("finish", seq_id=seq_id, reason=reason)
        self._decisions()

    def discarded(self) -> None:
        self._line("discard")
        self._decisions()

    def took(self, padded_tokens: int, ratio: float) -> None:
        self._line("time_ratio", padded_tokens=padded_tokens, ratio=ratio)

    def close(self) -> None:
        self._write()
        self._file.close()

    def _decisions(self) -> None:
        for decision in self._scheduler.decisions(self._next):
            self._line(**_decision(decision))
            self._next = decision.index + 1

    def _line(self, event: str, **fields: Any) -> None:
        if not self._file.closed:
            self._lines.append(json.dumps({"event": event} | fields) + "\n")

    def _write(self) -> None:
        data = "".join(self._lines).encode()
        self._lines.clear()
        end = self._size + len(data)
        try:
            while data:
                data = data[self._file.write(data) :]
            self._size = end
        except OSError as error:
            with suppress(OSError):  # what cannot be cut, such as a pipe
                self._file.truncate(self._size)
            self._file.close()
            warnings.warn(
                f"the trace {self._path} ends here: {error}", RuntimeWarning, stacklevel=2
            )


def _decision(decision: engine.Decision) -> dict[str, Any]:
    return {
        "event": decision.reason.name.lower(),
        "index": decision.index,
        "step": decision.step,
        "seq_id": decision.seq_id,
        "a": decision.a,
        "b": decision.b,
    }


def _expect(line: dict[str, Any], key: str, kind: Any, name: str) -> None:
    if not isinstance(line[key], kind):
        raise ValueError(f"{key} must be {name}, got {line[key]!r}")


class ReplayError(ValueError):
    """The scheduler decided otherwise than the trace says."""


class Replay:
    """Tells a new scheduler what a trace says and compares every decision and every batch.

    Attributes:
        scheduler: as it stands after the events replayed so far.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        self._number, start = self._read(next(self._lines, (1, "{}")))
        if start.get("event") != "start" or start.get("version") != VERSION:
            raise ValueError(f"{path} is not a trace of version {VERSION}")
        with self._named():
            _expect(start, "machine", str, "text")
            self.machine: str = start["machine"]
            self.settings: dict[str, Any] = start["settings"]
            self.scheduler = make_scheduler(self.settings)
        self._expected: list[dict[str, Any]] = []
        self._next = 0
        self._flying: dict[int, engine.Batch] = {}

    def events(self) -> Iterator[tuple[dict[str, Any], engine.Batch | None]]:
        """Each line after it was replayed; with ``schedule`` and ``commit`` lines the batch.

        Raises:
            ReplayError: at the first difference, with the line and both sides.
        """
        for item in self._lines:
            self._number, line = self._read(item)
            batch = None
            if "index" in line:
                self._compare("decision", line, self._decided(line))
            else:
                self._nothing_left()
                with self._named():
                    batch = self._tell(line)
            yield line, batch
        self._nothing_left()

    def _read(self, item: tuple[int, str]) -> tuple[int, dict[str, Any]]:
        number, text = item
        try:
            line: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{self._path}:{number} is not JSON: {error}") from error
        if not isinstance(line, dict):
            raise ValueError(f"{self._path}:{number} must hold a JSON object, got {text}")
        return number, line

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Says in which line a key is missing or has a value that the scheduler refuses."""
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ReplayError):
                raise
            what = f"there is no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{self._path}:{self._number}: {what}") from error

    def _tell(self, line: dict[str, Any]) -> engine.Batch | None:
        event, scheduler = line["event"], self.scheduler
        if event == "added":
            _expect(line, "request_id", str, "text")
            options = {k: v for k, v in line.items() if k not in ("event", "request_id")}
            scheduler.add(options.pop("seq_ids"), options.pop("prompt"), **options)
        elif event == "schedule":
            batch = scheduler.schedule(line["now"], line["only"])
            scheduler.take_expired()
            self._compare("step", line["step"], None if batch is None else batch.step)
            if batch is not None:
                self._compare("batch", line["digest"], f"{batch.digest():016x}")
                self._flying[batch.step] = batch
            return batch
        elif event == "commit":
            batch = self._flying.pop(line["step"])
            scheduler.commit(batch, line["tokens"])
            return batch
        elif event == "finish":
            scheduler.finish(line["seq_id"], line["reason"])
        elif event == "discard":
            scheduler.discard()
            self._flying.clear()
        elif event == "time_ratio":
            scheduler.add_time_ratio(line["padded_tokens"], line["ratio"])
        elif event == "ran":
            for key in ("step", "us", "predicted_us"):
                _expect(line, key, (int, float), "a number")
        else:
            raise ValueError(f"unknown event {event!r}")
        return None

    def _pull(self) -> None:
        decisions = self.scheduler.decisions(self._next)
        self._expected += map(_decision, decisions)
        self._next += len(decisions)

    def _decided(self, line: dict[str, Any]) -> dict[str, Any] | None:
        self._pull()
        return self._expected.pop(0) if self._expected else None

    def _nothing_left(self) -> None:
        self._pull()
        if self._expected:
            self._compare("decision", None, self._expected[0])

    def _compare(self, what: str, expected: object, got: object) -> None:
        if expected != got:
            raise ReplayError(
                f"{self._path}:{self._number}: the {what} differs: the trace has {expected}, "
                f"the replay {got}"
            )
