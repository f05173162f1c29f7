"""What the documentation says that quantising costs is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_table_is_that_of_the_rows() -> None:
    rows = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.jsonl")):  # the newest last
        for row in map(json.loads, path.read_text().splitlines()):
            if row["bench"] == "quality":
                rows[row["scheme"], row["method"], row["options"]] = row
    table = (ROOT / "docs" / "quantization.md").read_text()
    assert len(rows) > 20
    for (scheme, method, options), row in rows.items():
        mark = " **" if row["rise"] > 0.03 else ""
        line = f"| {scheme} | {method} | {options} | {row['loss']:.4f} | {row['rise']:+.1%}{mark} |"
        assert line in table, line
