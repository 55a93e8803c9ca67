"""What several commands share: options, progress on standard error, Ctrl-C as a question."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ModelName = Annotated[
    str, typer.Option("--model", help="nano, a folder, or a Hugging Face Hub id.")
]
PolicyText = Annotated[str, typer.Option(help="A pipe or a named policy; see `weir policies`.")]
Chunk = Annotated[int, typer.Option(min=1, help="Tokens taken in between two folds.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random draws.")]
SlotsName = Annotated[
    str, typer.Option("--slots", help="How slots of the middle are held: exact, int8, k8v4 or fp8.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


@cache
def messages() -> Console:
    """The terminal for what is not the answer: standard error."""
    from rich.console import Console

    # Without emoji: rich would make a picture of the `:ID:` in hub:ID:SPLIT.
    return Console(stderr=True, emoji=False)


@cache
def output() -> Console:
    """The terminal for answers: standard output."""
    from rich.console import Console

    return Console(emoji=False)


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


def load_model(
    name: str, *, encoders: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`weir.load`, which takes a while and says so.

    Args:
        name: of the model.
        encoders: an encoder will do as well.

    Raises:
        WeirError: as `load`.
    """
    with waiting(f"loading {name}"):
        from transformers.utils.logging import disable_progress_bar

        from weir.models import is_encoder, is_local, load, load_encoder

        if encoders and is_encoder(name):
            load = load_encoder
        if is_local(name):
            disable_progress_bar()
            return load(name)
    if messages().is_terminal:
        say(f"fetching {name} from the Hugging Face Hub")  # which shows bars of its own
    return load(name)


def with_products(model: PreTrainedModel) -> PreTrainedModel:
    """A model that decodes with the products that are faster here; to time them takes seconds once.

    Args:
        model: from `load_model`.
    """
    from weir.models import choose_products

    with waiting("timing matrix products"):
        choose_products(model)
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


class Interrupt:
    """How often Ctrl-C was pressed, and from which press on it breaks off."""

    def __init__(self, noted: float) -> None:
        self._outside = self._noted = noted
        self._pressed = 0

    def __bool__(self) -> bool:
        return self._pressed > 0

    def press(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        self._pressed += 1
        if self._pressed > self._noted:
            # Here and not only where a block ends: it may be one that has hardly begun.
            self._noted = self._outside
            raise KeyboardInterrupt

    @contextmanager
    def noting(self, presses: float) -> Iterator[None]:
        """In this block so many presses are only noted, those just before it among them."""
        try:
            self._noted = presses  # before the look back, so that none falls between the two
            if self._pressed > presses:
                raise KeyboardInterrupt
            yield
        finally:
            self._noted = self._outside
            self._pressed = 0


@contextmanager
def interruptible(noted: float = 1) -> Iterator[Interrupt]:
    """Ctrl-C is noted instead of breaking off, so that no forward is left half way.

    A second one breaks off after all, or the one after so many as are to be `noted`.
    """
    interrupt = Interrupt(noted)
    before = signal.signal(signal.SIGINT, interrupt.press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


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
