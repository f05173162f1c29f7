"""A test that hangs inside CUDA is named and ended.

A stream that never ends is waited for in C, where no signal handler runs and the GIL may be held:
pytest-timeout cannot end it. The watchdog of ``faulthandler`` needs neither: it prints where each
thread stands and ends the process. Under xdist that worker has crashed, by its test's name, and
another takes its place; alone, ``-v`` has printed the name, and the run ends.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator

import pytest

_STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("gpu_test_seconds", "the longest that a test marked gpu may take", default="120")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # while a test runs, the descriptor is captured


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("gpu") is None:
        return (yield)
    seconds = float(item.config.getini("gpu_test_seconds"))
    faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
