"""Runs every bench_*.py of this folder into one results file and prints its table."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

from ridgeline.roofline.machine import device_name
from timer import RESULTS

HERE = Path(__file__).parent


def results_file(device: str) -> Path:
    """benchmarks/results/<date>_<machine>.jsonl."""
    machine = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return RESULTS / f"{date.today().isoformat()}_{machine}.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="comma-separated names, as in bench_NAME.py")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    given = parser.parse_args()
    out = given.out or results_file(given.device)
    wanted = {name for name in given.only.split(",") if name}
    failed = []
    for script in sorted(HERE.glob("bench_*.py")):
        if wanted and script.stem.removeprefix("bench_") not in wanted:
            continue
        command = [sys.executable, str(script), "--device", given.device, "--out", str(out)]
        command += ["--quick"] if given.quick else []
        command += ["--commit", given.commit] if given.commit else []
        if subprocess.run(command, check=False).returncode != 0:
            failed.append(script.name)
    if out.exists():
        subprocess.run([sys.executable, str(HERE / "table.py"), str(out)], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
