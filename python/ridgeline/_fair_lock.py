"""A lock for loops: who waits for it comes before who has just released it."""

from __future__ import annotations

import threading


class FairLock:
    """A reentrant lock. A thread that releases it and takes it again at once, as the loop of steps
    does, would nearly always get a plain one before those that wait: they start only at its end.

    Who wants the lock holds the turn while it waits, so whoever wants it next waits for the turn.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():  # no other thread sets it to this
            self._lock.acquire()
        else:
            with self._turn:
                self._lock.acquire()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
        self._lock.release()
