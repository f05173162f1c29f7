"""The ``ridgeline`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ridgeline._cli import generate, info, plan, quantize, replay
from ridgeline._version import __version__

_USER_ERROR = 2
_BROKEN_PIPE = 141  # as a shell says of a process that SIGPIPE ended


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
        code: int | None = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has enough; the interpreter flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"ridgeline: error: {error}", file=sys.stderr)
        return _USER_ERROR
    except KeyboardInterrupt:
        print("ridgeline: interrupted", file=sys.stderr)
        return 130
    return code or 0
