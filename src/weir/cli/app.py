"""`weir` without its commands: what a command is, and `--version`.

Nothing that is imported here imports PyTorch: commands import what they need when they run, so that
help and lists come at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from weir import __version__

# Progress and warnings of libraries would mix with ours; errors still come through.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


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


quick_command = _Command
"""What a command of a group is made as (`cls`)."""


class _Commands(_Quick, TyperGroup):
    """`weir` itself."""


app = typer.Typer(
    name="weir",
    cls=_Commands,
    help="Any Hugging Face decoder on token streams without end, in a KV cache of fixed size. "
    "Pools of your own: weir --import my_pools,more/pools.py COMMAND.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help imports a parser of Markdown first
)


def command(
    name: str | None = None, *, words: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the command of its name, or of another `name`; its options are typer's.

    Args:
        name: of the command.
        words: it takes words that are no options, called so in its help, and finds them in the
            `args` of its context; those of typer's own kind would import pydantic.
    """
    metavar = "[OPTIONS]" if words is None else f"[OPTIONS] {words}"
    settings = {"allow_extra_args": words is not None}
    return app.command(name, cls=_Command, context_settings=settings, options_metavar=metavar)


def group(name: str) -> typer.Typer:
    """A command that has commands of its own, and does something by itself."""
    made = typer.Typer(cls=_Commands, rich_markup_mode=None, add_completion=False)
    app.add_typer(made, name=name)
    return made


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
