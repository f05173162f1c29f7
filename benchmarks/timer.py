"""Rows of benchmarks: one timer, one set of fields, for every script beside this one."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch

from cold_read import read_us
from ridgeline.roofline import Cost
from ridgeline.roofline.machine import Roofs, device_name, measure_roofs
from ridgeline.roofline.timing import Timing, time_calls

RESULTS = Path(__file__).parent / "results"


def _commit() -> str:
    """The commit measured, marked when the tree differs from it; a file beside a copied tree."""
    here = Path(__file__).resolve().parent
    try:
        command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass
class Bench:
    """One run of a benchmark script: all its rows share a run id, so baselines compare."""

    device: str
    out: Path | None
    quick: bool
    commit: str
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_args(cls, description: str | None, arguments: Sequence[str] | None = None) -> Bench:
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--out", type=Path, help="append rows to this JSON-lines file")
        parser.add_argument("--quick", action="store_true", help="fewer shapes, fewer replays")
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        parser.add_argument("--commit", help="commit to name when the tree has no git folder")
        given = parser.parse_args(arguments)
        return cls(given.device, given.out, given.quick, given.commit or _commit())

    @property
    def roofs(self) -> Roofs:
        return measure_roofs(self.device)

    def measure(self, *, impl: str, call: Callable[..., Any], **others: Any) -> Timing:
        """Times one call and keeps its row; arguments as in :meth:`compare`."""
        return self.compare(calls={impl: call}, **others)[0]

    def compare(
        self,
        *,
        op: str,
        calls: dict[str, Callable[..., Any]],
        make: Callable[[], Sequence[Any]],
        cost: Cost,
        fields: dict[str, Any],
        chained: bool | None = None,
        reads_only: bool = False,
        launches: int = 20,
        touched: int | None = None,
        least_sets: int = 2,
    ) -> list[Timing]:
        """Times calls on the same inputs by turns, and keeps a row of each.

        Args:
            op: the rows' ``bench``.
            calls: ``impl`` -> the call; see :func:`ridgeline.roofline.timing.time_calls`.
            cost: bytes and flops that any implementation must spend.
            fields: the shape and dtype, as plain fields of the row.
            chained: true under programmatic dependent launch; None: as our ops are launched.
            reads_only: the floor is that of the read roof instead of the copy roof; on a GPU the
                row has the time of a cold read of as many bytes, too.
            launches, touched, least_sets: as of :func:`ridgeline.roofline.timing.time_calls`.
        """
        replays = 5 if self.quick else 15
        timings = time_calls(
            make, list(calls.values()), launches=launches, replays=replays, device=self.device,
            touched=touched, least_sets=least_sets,
        )  # fmt: skip
        floor = self.roofs.floor_us(cost, reads_only=reads_only)
        reads = reads_only and self.device != "cpu"
        cold_read = {"read_us": round(read_us(self.device, cost.bytes), 3)} if reads else {}
        for impl, timing in zip(calls, timings, strict=True):
            ours = self.device != "cpu" and impl == "ridgeline"
            row = {
                "bench": op,
                "impl": impl,
                **fields,
                "chained": ours if chained is None else chained,
                "us": round(timing.us, 3),
                "us_p10": round(timing.us_p10, 3),
                "us_p90": round(timing.us_p90, 3),
                "cold": timing.cold,
                "bytes": cost.bytes,
                "flops": cost.flops,
                "floor_us": round(floor, 3),
                **cold_read,
                "share": round(floor / timing.us, 4),
                "bound": self.roofs.bound(cost, reads_only=reads_only),
                **self.machine(),
            }
            self.add(row)
        return timings

    def add(self, row: dict[str, Any]) -> None:
        """Keeps a row and writes it at once, so that a run cut short loses nothing."""
        self.rows.append(row)
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        print(_line(row), flush=True)

    def machine(self) -> dict[str, Any]:
        return {
            "machine": device_name(self.device),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "commit": self.commit,
            "date": date.today().isoformat(),
            "run": self.run,
        }


NOT_SHAPE = {
    "bench", "impl", "chained", "us", "us_p10", "us_p90", "cold", "bytes", "flops", "floor_us",
    "read_us", "share", "bound", "machine", "torch", "cuda", "python", "commit", "date", "run",
}  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    shape = " ".join(f"{k}={v}" for k, v in row.items() if k not in NOT_SHAPE)
    if "us" not in row:  # a whole engine's row: its results are plain fields
        return f"{row['bench']:<16} {row['impl']:<14} {shape}"
    speed = ""
    if row.get("bytes") and row["us"]:
        rates = (row[quantity] / row["us"] / 1e6 for quantity in ("bytes", "flops"))
        speed = "{:6.2f} TB/s {:7.1f} TF".format(*rates)
    read = f" {row['us'] / row['read_us']:5.2f} x read" if "read_us" in row else ""
    return (
        f"{row['bench']:<16} {row['impl']:<14} {shape:<48} {row['us']:>10.2f} us {speed} "
        f"{100 * row.get('share', 0):5.1f}% {row.get('bound', '')}{read}"
    )


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function through torch.compile, as a baseline."""
    return torch.compile(function, fullgraph=True)
