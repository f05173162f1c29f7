"""What every test shares: the GPU rule and reproducible random inputs."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

import ridgeline
from hang_guard import (  # noqa: F401
    pytest_addoption,
    pytest_configure,
    pytest_runtest_protocol,
    pytest_unconfigure,
)

# The machine's speed is no property of the code: no deadlines, and the same examples each time.
hypothesis.settings.register_profile("ridgeline", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ridgeline")


# Workers side by side share the cores: with all of them for each, threads that wait spin in the
# way of those that work (16 workers on 16 cores: a set-up of half a second took a minute).
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))


def pytest_report_header() -> list[str]:
    return str(ridgeline.info()).splitlines()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` run where the CUDA ops are loaded and are skipped elsewhere."""
    info = ridgeline.info()
    if info.cuda_loaded and info.devices:
        return
    if torch.cuda.is_available() and config.option.markexpr == "gpu":
        # Asked for, on a GPU, without our kernels: a broken installation, no reason to skip.
        raise pytest.UsageError(f"there is a GPU, but no CUDA ops: {info.cuda_reason}")
    skip = pytest.mark.skip(reason=f"no GPU: {info.cuda_reason}")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
