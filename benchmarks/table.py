"""Prints rows of benchmarks/results as a table: each op beside its baselines of the same run."""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from timer import NOT_SHAPE, RESULTS

Row = dict[str, Any]


def read_rows(paths: list[Path]) -> list[Row]:
    """All rows of the files, in order."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines() if line]


def _shape(row: Row) -> str:
    return " ".join(f"{k}={v}" for k, v in row.items() if k not in NOT_SHAPE)


def table(rows: list[Row]) -> str:
    """Markdown: one line a shape; baselines are those of the same run."""
    grouped: dict[tuple[str, str, str], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if "us" in row:
            of_shape, impl = grouped[row["run"], row["bench"], _shape(row)], row["impl"]
            again = impl == "ridgeline" and impl in of_shape  # alone comes first
            of_shape["ridgeline chained" if again else impl] = row
    lines = [
        "| op | shape | us | cold read, us | TB/s | TFLOP/s | share of roof | bound "
        "| baselines, us |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (_, bench, shape), by_impl in grouped.items():
        ours = by_impl.pop("ridgeline", None)
        if ours is None:
            continue
        others = ", ".join(f"{impl} {row['us']:.1f}" for impl, row in by_impl.items())
        rates = (ours[of] / ours["us"] / 1e6 for of in ("bytes", "flops"))
        lines.append(
            f"| {bench} | {shape} | {ours['us']:.2f} | {ours.get('read_us', '')} "
            "| {:.2f} | {:.1f} ".format(*rates)
            + f"| {100 * ours['share']:.0f}% | {ours['bound']} | {others} |"
        )
    return "\n".join(lines)


QUANTISED = {
    "int4": ("int4_linear", None),
    "w4a8": ("int4_linear", "fp8"),
    "fp8": ("fp8_linear", "fp8"),
    "int8": ("int8_linear", None),
}
"""Schemes of :func:`ridgeline.advise_quantization`: op, and the rows' ``x``."""
WIDE = ("ridgeline", "cublas")


def gains(rows: list[Row]) -> str:
    """Markdown: how many times as fast as 16 bits a quantised product is, as floors predict and as
    measured, of the last run with both. 16 bits are those of the faster of ours and cuBLAS."""
    found: dict[str, dict[tuple[int, int, int], dict[str, Row]]] = {}
    for row in rows:
        kind = _kind(row)
        if kind is not None:
            shapes = found.setdefault(row["run"], defaultdict(dict))
            shapes[row["K"], row["N"], row["M"]].setdefault(kind, row)
    cells: dict[tuple[int, int, int], str] = {}  # a later run's stand for those of one before
    for shapes in found.values():
        for shape, by in shapes.items():
            wide = [by[impl] for impl in WIDE if impl in by]
            schemes = [by.get(name) for name in QUANTISED]
            if wide and any(schemes):
                us, floor = min(row["us"] for row in wide), wide[0]["floor_us"]
                cells[shape] = " | ".join(
                    "" if row is None else f"{floor / row['floor_us']:.1f}, {us / row['us']:.1f}"
                    for row in schemes
                )
    lines = [f"| {K} x {N} | {M} | {cells[K, N, M]} |" for K, N, M in sorted(cells)]
    head = f"| K x N | rows | {' | '.join(QUANTISED)} |"
    return "\n".join(["", head, "|---" * (2 + len(QUANTISED)) + "|", *lines]) if lines else ""


def _kind(row: Row) -> str | None:
    """Of a product alone and with nothing fused: its scheme, or who multiplied 16 bits."""
    if row.get("chained") is not False or {"fused", "scales"} & row.keys():
        return None
    if row["bench"] == "linear":
        return row["impl"] if row["impl"] in WIDE else None
    if row["impl"] != "ridgeline":
        return None
    of = (row["bench"], row.get("x"))
    return next((name for name, known in QUANTISED.items() if known == of), None)


WHOLE_MODELS = {
    "llm": ("case", "options", "requests", "prompt", "output", "tok_s", "ttft_ms", "itl_ms_p50",
            "itl_ms_p99", "mbu", "mfu", "seconds", "start_s", "captured_s"),
    "transformers": ("impl", "mode", "batch", "prompt", "output", "tok_s", "ms", "ttft_ms"),
    "quality": ("scheme", "method", "options", "loss", "rise"),
    "load": ("gb", "seconds", "gb_s", "ready_s", "host_gb"),
}  # fmt: skip


def model_table(rows: list[Row], bench: str) -> str:
    """Markdown: one line a run of a whole model; empty if there is none."""
    fields = WHOLE_MODELS[bench]
    runs = [row for row in rows if row["bench"] == bench]
    if not runs:
        return ""
    lines = [f"| {' | '.join(fields)} |", "|---" * len(fields) + "|"]
    lines += [f"| {' | '.join(str(row.get(name, '')) for name in fields)} |" for row in runs]
    return "\n".join(["", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="default: the newest results file")
    files = parser.parse_args().files or sorted(RESULTS.glob("*.jsonl"))[-1:]
    rows = read_rows(files)
    for key in ("machine", "torch", "cuda", "commit", "date"):
        print(f"{key}: {', '.join(sorted({str(r.get(key)) for r in rows}))}")
    print(table(rows))
    print(gains(rows))
    for bench in WHOLE_MODELS:
        print(model_table(rows, bench))


if __name__ == "__main__":
    main()
