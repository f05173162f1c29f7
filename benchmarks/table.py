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
    for bench in WHOLE_MODELS:
        print(model_table(rows, bench))


if __name__ == "__main__":
    main()
