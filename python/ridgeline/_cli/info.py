"""``ridgeline info``."""

from __future__ import annotations

import argparse
from typing import Any

import ridgeline


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "info", help="versions, devices, which parts are loaded and why one is not"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    print(ridgeline.info())
