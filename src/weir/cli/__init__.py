"""The command line: `weir COMMAND`, one file per command."""

from weir.cli.cli import main, run_program
