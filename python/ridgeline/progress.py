"""A progress bar of generation on stderr."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from ridgeline.outputs import StreamOutput

_WIDTH = 24
_INTERVAL = 0.1


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
        live = self._file.isatty() or "ipykernel" in sys.modules
        self._interval = _INTERVAL if live else float("inf")
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
