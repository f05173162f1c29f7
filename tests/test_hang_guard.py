"""A test that hangs in C with the GIL held is named, and its process ends."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HANGS = """
import ctypes
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("seconds", [0, 100])
def test_waits(seconds):
    ctypes.PyDLL(None).sleep(seconds)

def test_after():
    pass
"""


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_file.py").write_text(HANGS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  timeout\n")
    # Loaded as a plugin, without this folder's conftest, which skips what needs a GPU.
    command = [sys.executable, "-m", "pytest", "-p", "hang_guard", "-o", "gpu_test_seconds=1"]
    return subprocess.run(
        [*command, *options, "test_file.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=50,
    )


def test_a_hang_ends_the_run_by_name(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "-v", "-p", "no:xdist")
    assert result.returncode == 1
    assert "Timeout (0:00:01)!" in result.stderr and "in test_waits" in result.stderr
    assert "test_waits[0] PASSED" in result.stdout
    assert result.stdout.rstrip().endswith("::test_waits[100]")


@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="no pytest-xdist")
def test_a_hang_of_a_worker_is_a_failure_by_name(tmp_path: Path) -> None:
    result = run_pytest(tmp_path, "-n", "1")
    assert result.returncode == 1
    assert "crashed while running 'test_file.py::test_waits[100]'" in result.stdout
    assert "1 failed, 2 passed" in result.stdout
