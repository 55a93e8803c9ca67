"""All commands in one application: who they are, `--version`, and wrong usage in one line.

Knows no command from the inside. Nothing that is imported here imports PyTorch: commands import
what they need when they run, so that help and lists come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from weir import __version__

# Progress and warnings of libraries would mix with ours; errors still come through.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

# typer brings click with it in some versions and not in others: what a wrong option raises.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class _Quick:
    """What keeps typer's help from importing more than it needs; half of the time is saved."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option `--help`, false where it is not given: for None typer imports pydantic."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.default = False
        return option

    def get_short_help_str(self, limit: int = 45) -> str:
        """What the list of commands says of it: its whole first sentence, however long."""
        sentence: str = super().get_short_help_str(1000)  # type: ignore[misc]
        return sentence


class _Command(_Quick, TyperCommand):
    """A command."""


class _Commands(_Quick, TyperGroup):
    """`weir` itself."""


app = typer.Typer(
    name="weir",
    cls=_Commands,
    help="Any Hugging Face decoder on token streams without end, in a KV cache of fixed size.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its help is boxes, and imports a reader of Markdown
)


def command(name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the command of its name, or of another `name`; its options are typer's."""
    return app.command(name, cls=_Command)


def run(arguments: list[str]) -> int:
    """Carry out the command that some arguments ask for; its exit code.

    Raises:
        WeirError: the command cannot be carried out; the message says why.
    """
    from weir.cli import (  # noqa: F401  (they register)
        advise,
        attention_error,
        bench,
        chat,
        demo,
        evaluate,
        policies,
        report,
        stream,
        train,
    )

    try:
        code = app(arguments, prog_name="weir", standalone_mode=False)
    except UsageError as error:
        sys.stderr.write(f"weir: {' '.join(_usage(error).split())}\n")
        return 2
    return code if isinstance(code, int) else 0


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"weir {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and leave."
    ),
) -> None:
    pass


def _usage(error: object) -> str:
    """What is wrong with the arguments, and where to read how it is right."""
    problem = getattr(error, "format_message", lambda: str(error))().rstrip(".")
    context = getattr(error, "ctx", None)
    return f"{problem}; see {context.command_path if context else 'weir'} --help"
