"""What several commands share: options, progress on standard error, tables that fit."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from transformers import PreTrainedModel

    from weir.policies import Policy

ModelName = Annotated[
    str,
    typer.Option("--model", help="nano, a folder, or a Hugging Face Hub id."),
]
TextPath = Annotated[
    Path, typer.Option("--text", help="The text: UTF-8, plain or .xz; - for standard input.")
]
PolicyText = Annotated[
    str,
    typer.Option(help="A pipe or a named policy; see `weir policies`."),
]
Chunk = Annotated[
    int, typer.Option(min=1, help="New tokens taken in before it is decided again which stay.")
]
PolicyChunk = Annotated[
    int | None,
    typer.Option(
        "--chunk",
        min=1,
        help="New tokens taken in before it is decided again which stay [default: 64, or what a "
        "policy file was measured with]",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random draws.")]
SlotsName = Annotated[
    str | None,
    typer.Option(
        "--slots",
        help="How slots of the middle are held: exact, int8, k8v4 or fp8 [default: as the policy "
        "says]",
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile decode steps; the first takes from seconds to minutes, and a C++ compiler.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

DEFAULT = "weir(budget=256)"
"""The policy where none is given; written here too, for where it is from brings PyTorch."""
DEFAULT_NAME = DEFAULT.partition("(")[0]
"""The same where it is sized by what there is room for."""
WIDE = 100_000
"""Columns of a terminal on which no table is too wide."""


@cache
def messages() -> Console:
    """The terminal for what is not the answer: standard error."""
    from rich.console import Console

    # Without emoji: rich would make a picture of the `:ID:` in hub:ID:SPLIT.
    return Console(stderr=True, emoji=False, width=_width())


@cache
def output() -> Console:
    """The terminal for answers: standard output."""
    from rich.console import Console

    return Console(emoji=False, width=_width())


def _width() -> int | None:
    """Columns of a terminal that says it has none, as some do that do not know; None: it knows."""
    return 80 if os.environ.get("COLUMNS", "").strip() == "0" else None


def print_table(table: Table) -> None:
    """A table on standard output; where the terminal is too narrow, lines run past its end.

    Columns that are not to be wrapped are never cut, and so no figure is.
    """
    console = output()
    wide = console.options.update(width=WIDE)
    for column in table.columns:
        if column.no_wrap:
            cells = [column.header, *column.cells]
            column.min_width = max(console.measure(cell, options=wide).maximum for cell in cells)
    least = console.measure(table, options=wide).minimum
    console.print(table, width=max(console.width, least), crop=False)


def print_json(facts: Any) -> None:
    """One JSON object on standard output; numbers that JSON does not have become null."""
    from weir.evals.results import for_json

    sys.stdout.write(json.dumps(for_json(facts), ensure_ascii=False) + "\n")


def say(text: str) -> None:
    """One line on standard error, as it is: no markup, and not broken where the terminal ends."""
    messages().print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on a terminal that something is under way whose end nobody can foretell."""
    with messages().status(f"{what} …"):
        yield


def in_lines() -> bool:
    """Whether progress is told in lines: where standard error is no terminal to draw a bar on."""
    return not messages().is_interactive


def say_window(model: PreTrainedModel, policy: Policy, chunk: int) -> None:
    """Say so where a policy may hold more tokens at once than the model was made for."""
    from weir.cache import describe_window_excess

    if (told := describe_window_excess(model, policy, chunk)) is not None:
        say(told)


def say_set_aside(
    model: PreTrainedModel | str, policy: str | None, slots: str | None, revision: str | None = None
) -> None:
    """Say so where `--slots` alone takes the usual policy in place of one that lies with the model.

    Args:
        model, revision: as for `models.sidecar_path`.
        policy, slots: what `--policy` and `--slots` say.
    """
    if policy is not None or slots is None:
        return
    from weir.cache import FILE
    from weir.models import sidecar_path

    if (file := sidecar_path(model, FILE, revision)) is not None:
        say(
            f"{file} lies with the model and is set aside by --slots; if its own slots are exact, "
            f"--policy {file} --slots {slots} takes both"
        )


def with_products(model: PreTrainedModel) -> PreTrainedModel:
    """A model that decodes with the products that are faster here; to time them takes seconds once.

    Args:
        model: from `load_model`.
    """
    from weir.models import choose_products

    with waiting("timing matrix products"):
        choose_products(model)
    return model


def with_compiled_steps(model: PreTrainedModel, wanted: bool) -> PreTrainedModel:
    """A model whose decode steps are compiled, if that is wanted.

    Args:
        model: from `load_model`.
        wanted: what `--compile` says.
    """
    if wanted:
        from weir.models import compile_steps

        with waiting("timing matrix products"):
            compile_steps(model)
    return model


def progress() -> Progress:
    """A progress bar on standard error, if that is a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        TimeRemainingColumn(),
        console=messages(),
        transient=True,
        disable=not messages().is_interactive,
    )


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option was typed, though it may be its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def say_unused(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Name the options that were typed though nothing will read them.

    Args:
        context: of the command.
        names: of its parameters.
        why: what they are for, as the end of a sentence.
    """
    typed = [f"--{name.replace('_', '-')}" for name in names if was_given(context, name)]
    if typed:
        *first, last = typed
        listed = f"{', '.join(first)} and {last}" if first else last
        say(f"{listed} {'change' if first else 'changes'} nothing here: {why}")


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers with commas between them.

    Raises:
        typer.BadParameter: they are none; named by their option.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        raise typer.BadParameter(
            f"{option} takes whole numbers with commas between them, not {text!r}"
        )
    return [int(word) for word in words]


def size(nbytes: float) -> str:
    """Bytes for people: 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")
