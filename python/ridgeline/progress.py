"""Progress bars on stderr: of loading and of generation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from ridgeline.outputs import StreamOutput

_WIDTH = 24
_INTERVAL = 0.1


def _live(file: TextIO) -> bool:
    """Whether what is drawn can be drawn again over it."""
    return file.isatty() or "ipykernel" in sys.modules


def check_progress(progress: Any) -> None:
    """TypeError for what is neither a bool nor a function."""
    if not isinstance(progress, bool) and not callable(progress):
        raise TypeError(f"progress must be a bool or a function, got {progress!r}")


def loading_callback(
    progress: bool | Callable[[int, int], None],
) -> Callable[[int, int], None] | None:
    """What to call while loading; True: a bar's."""
    check_progress(progress)
    if isinstance(progress, bool):
        return LoadingBar().update if progress else None
    return progress


class LoadingBar:
    """One line: tensors read. Drawn once where it cannot be drawn again."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = sys.stderr if file is None else file
        self._interval = _INTERVAL if _live(self._file) else float("inf")
        self._start = self._drawn = time.perf_counter()

    def update(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if done < total and now - self._drawn < self._interval:
            return
        self._drawn = now
        filled = _WIDTH * done // max(total, 1)
        self._file.write(
            f"\r[{'#' * filled}{'-' * (_WIDTH - filled)}] {done}/{total} tensors, "
            f"{now - self._start:.1f} s{chr(10) * (done == total)}"
        )
        self._file.flush()


class ProgressBar:
    """One line: requests done, tokens, tokens a second.

    On a terminal and in a notebook it is drawn ten times a second, elsewhere at the end. With
    ``tokens`` (the most that will come) the bar follows tokens, otherwise requests.
    """

    def __init__(
        self, requests: int, *, tokens: int | None = None, file: TextIO | None = None
    ) -> None:
        self._requests, self._tokens = requests, tokens
        self._file = sys.stderr if file is None else file
        self._interval = _INTERVAL if _live(self._file) else float("inf")
        self._done = self._count = 0
        self._start = time.perf_counter()
        self._drawn = self._start

    def update(self, update: StreamOutput) -> None:
        self._done += update.request is not None
        self._count += len(update.token_ids)
        if time.perf_counter() - self._drawn > self._interval:
            self._draw()

    def close(self) -> None:
        """Draws the last state and ends the line."""
        self._draw()
        self._file.write("\n")
        self._file.flush()

    def _draw(self) -> None:
        self._drawn = time.perf_counter()
        done, total = (
            (self._done, self._requests)
            if self._tokens is None
            else (self._tokens if self._done == self._requests else self._count, self._tokens)
        )
        filled = _WIDTH * done // max(total, 1)
        rate = self._count / max(self._drawn - self._start, 1e-9)
        self._file.write(
            f"\r[{'#' * filled}{'-' * (_WIDTH - filled)}] {self._done}/{self._requests} requests, "
            f"{self._count} tokens, {rate:.1f} tokens/s "
        )
        self._file.flush()
