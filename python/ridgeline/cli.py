"""The ``ridgeline`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ridgeline._cli import generate, info, plan, quantize, replay
from ridgeline._version import __version__

_USER_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; the process's exit code. A user's mistake is one line on stderr."""
    parser = argparse.ArgumentParser(
        prog="ridgeline",
        description="LLM inference: generate text, quantise models, show the installation.",
    )
    parser.add_argument("--version", action="version", version=f"ridgeline {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (generate, quantize, plan, replay, info):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, TypeError, FileNotFoundError, ImportError) as error:
        print(f"ridgeline: error: {error}", file=sys.stderr)
        return _USER_ERROR
    except KeyboardInterrupt:
        print("ridgeline: interrupted", file=sys.stderr)
        return 130
    return 0
