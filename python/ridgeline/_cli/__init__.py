"""Subcommands of the ``ridgeline`` command, one module each."""
