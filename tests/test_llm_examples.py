"""Each script in examples/ runs as it stands and prints something."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from tiny_model import one_thread  # noqa: F401

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))

pytestmark = pytest.mark.skipif(
    not (ROOT / "models" / "demo" / "config.json").exists(),
    reason="the bundled model is not beside the tests",
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_example_runs(script: Path, capsys):
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
