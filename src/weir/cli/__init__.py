"""The command line: `weir COMMAND`, one file a command."""

from weir.cli.cli import main

__all__ = ["main"]
