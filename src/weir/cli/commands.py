"""All commands, and carrying one out; wrong usage is one line. Knows none from the inside."""

from __future__ import annotations

import sys

import typer

from weir.cli import (  # noqa: F401  (they register)
    advise,
    attention_error,
    bench,
    bench_serve,
    calibrate,
    chat,
    demo,
    evaluate,
    inspect,
    policies,
    report,
    serve,
    sinks,
    size,
    stream,
    train,
)
from weir.cli.app import app
from weir.cli.importing import import_modules, without_import

# typer brings click with it in some versions and not in others: what a wrong option raises.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def run(arguments: list[str]) -> int:
    """Carry out the command that some arguments ask for; its exit code.

    Raises:
        WeirError: the command cannot be carried out; the message says why.
    """
    try:
        arguments, modules = without_import(arguments)
    except ValueError as error:
        sys.stderr.write(f"weir: {error}\n")
        return 2
    if modules:
        import_modules(modules)
    try:
        code = app(arguments or ["--help"], prog_name="weir", standalone_mode=False)
    except UsageError as error:
        sys.stderr.write(f"weir: {' '.join(_usage(error).split())}\n")
        return 2
    return code if isinstance(code, int) else 0


def _usage(error: object) -> str:
    """What is wrong with the arguments, and where to read how it is right."""
    problem = getattr(error, "format_message", lambda: str(error))().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{problem}; see {context.command_path if context else 'weir'} --help"
