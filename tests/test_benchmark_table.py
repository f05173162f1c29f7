"""What tables of the documentation say is what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from table import gains, read_rows  # noqa: E402


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


def product(bench: str, us: float, floor_us: float, **fields: object) -> dict[str, object]:
    row = {"bench": bench, "impl": "ridgeline", "chained": False, "us": us, "floor_us": floor_us}
    return row | {"run": "a", "M": 8, "K": 64, "N": 32, "dtype": "bfloat16"} | fields


def test_gains_are_predicted_and_measured_in_one_run() -> None:
    """Not those of chained, fused or invariant products, of another shape or of a run without 16
    bits, and 16 bits by whoever is faster."""
    rows = [
        product("linear", 12.0, 8.0),
        product("linear", 10.0, 8.0, impl="cublas"),
        product("linear", 5.0, 8.0, chained=True),
        product("int4_linear", 4.0, 2.0, group=128),
        product("int4_linear", 1.0, 2.0, group=128, impl="tinygemm"),
        product("int4_linear", 1.0, 2.0, group=128, impl="ridgeline_invariant"),
        product("int4_linear", 8.0, 4.0, group=128, x="fp8"),
        product("int8_linear", 5.0, 4.0, fused="gelu"),
        product("fp8_linear", 5.0, 4.0, x="fp8", run="b"),
        product("fp8_linear", 5.0, 4.0, x="fp8", M=16),
    ]
    assert gains(rows).splitlines()[1:] == [
        "| K x N | rows | int4 | w4a8 | fp8 | int8 |",
        "|---|---|---|---|---|---|",
        "| 64 x 32 | 8 | 4.0, 2.5 | 2.0, 1.2 |  |  |",
    ]
    again = [product("linear", 3.0, 3.0, run="c"), product("int8_linear", 1.0, 1.0, run="c")]
    assert gains(rows + again).splitlines()[-1] == "| 64 x 32 | 8 |  |  |  | 3.0, 3.0 |"
    assert gains(rows[4:]) == ""


def test_the_gains_of_the_documentation_are_those_of_the_rows() -> None:
    rows = read_rows([ROOT / "benchmarks" / "results" / "2026-11-24_nvidia-h200.jsonl"])
    table = gains([row for row in rows if row["commit"] == "b8b5441be67e"])
    assert table and table in (ROOT / "docs" / "quantization.md").read_text()
