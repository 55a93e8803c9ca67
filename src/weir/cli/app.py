"""What a command is, and those whose files are imported. Knows the name of none.

Nothing that is imported here imports PyTorch: commands import what they need when they run, so that
help and lists come at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# Progress and warnings of libraries would mix with ours; errors still come through.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELIZM", "true")


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


class Commands(_Quick, TyperGroup):
    """A command that has commands of its own."""


PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # rich's help imports a parser of Markdown first
}
"""What every part of the command line is made with."""
MADE: dict[str, typer.Typer] = {}
"""By name, the commands whose files are imported."""


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

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        called = name or function.__name__
        made = MADE[called] = typer.Typer(**PLAIN)
        how = made.command(called, cls=_Command, context_settings=settings, options_metavar=metavar)
        return how(function)

    return make


def group(name: str) -> typer.Typer:
    """A command that has commands of its own, and does something by itself."""
    made = MADE[name] = typer.Typer(name=name, cls=Commands, **PLAIN)
    return made
