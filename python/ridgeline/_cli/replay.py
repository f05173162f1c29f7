"""``ridgeline replay``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ridgeline.timeline import Timeline
from ridgeline.trace import Replay


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="run a trace's schedule again and draw it",
        description="Runs the scheduler again as a trace (LLM(..., trace=FILE)) tells, without a "
        "GPU or a model, fails at the first decision or batch that differs, and prints a timeline: "
        "a lane for each request, with its number and the tokens of its prompt.",
    )
    parser.add_argument("trace", metavar="FILE", type=Path)
    parser.add_argument("--svg", metavar="FILE", type=Path, help="draw the timeline there too")
    parser.add_argument("--width", type=int, default=100, metavar="N", help="columns (%(default)s)")
    parser.add_argument("--lanes", type=int, default=40, metavar="N", help="requests (%(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    timeline = Timeline.of(Replay(options.trace))
    print(timeline.text(width=options.width, lanes=options.lanes))
    if options.svg is not None:
        options.svg.write_text(timeline.svg(), encoding="utf-8")
