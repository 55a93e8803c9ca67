"""Shared parts of commands: progress on standard error, tables that fit, notes about models."""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weir.errors import WeirError, format_size, format_value, in_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from transformers import PreTrainedModel

    from weir.policies import Policy


size = format_size
SHORT = 20
"""Waits shorter than this many seconds are not announced."""
WIDE = 100_000
"""Width in characters of an imaginary terminal that fits every table, to measure tables with."""


class RemainingTime:
    """Announces once how long a command will still take, if the wait is long."""

    def __init__(self, what: str) -> None:
        self.what, self._began, self._said = what, time.monotonic(), False

    def at(self, share: float) -> None:
        """Announce the remaining time, given the share of the work that is done."""
        took = time.monotonic() - self._began
        left = took / share - took
        if not self._said and left >= SHORT:
            self._said = True
            say(f"{self.what}: {_minutes(left)} left at this pace")


class ProgressLines:
    """Prints a line about work in progress from time to time, if no progress bar is shown."""

    EVERY = 30.0
    """Seconds between two lines."""

    def __init__(self) -> None:
        self._began = self._last = time.monotonic()
        self._first: float | None = None

    def at(self, share: float, done: str) -> None:
        """Print a line if one is due, given the share of work done and a description of it."""
        now = time.monotonic()
        if self._first is None:
            self._began, self._last, self._first = now, now, share
        if not in_lines() or now - self._last < self.EVERY:
            return
        self._last = now
        new = share - self._first
        left = "" if new <= 0 else f", {_minutes((now - self._began) * (1 - share) / new)} left"
        say(f"{done}{left}")


def _minutes(seconds: float) -> str:
    """Format a duration: `about 3 minutes`."""
    if seconds >= 90:
        return f"about {in_words(round(seconds / 60), 'minute')}"
    return f"about {in_words(round(seconds), 'second')}"


@cache
def messages() -> Console:
    """Return the console for messages, which writes to standard error."""
    from rich.console import Console

    # Without emoji: rich would replace the `:ID:` in hub:ID:SPLIT with a picture.
    return Console(stderr=True, emoji=False, width=_width())


@cache
def output() -> Console:
    """Return the console for results, which writes to standard output."""
    from rich.console import Console

    return Console(emoji=False, width=_width())


def _width() -> int | None:
    """Return 80 for a terminal that reports a width of 0, or None to let rich find the width."""
    return 80 if os.environ.get("COLUMNS", "").strip() == "0" else None


def print_line(text: object, console: Console | None = None) -> None:
    """Print one line, to standard output unless told otherwise, without markup or wrapping."""
    (console or output()).print(str(text), markup=False, highlight=False, soft_wrap=True)


def print_table(table: Table) -> None:
    """Print a table to standard output. On a narrow terminal its lines run past the edge.

    Columns that must not wrap are never cut, so every figure stays whole.
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
    """Print one JSON object to standard output; infinities and NaN become null."""
    from weir.evals.results import for_json

    sys.stdout.write(json.dumps(for_json(facts), ensure_ascii=False) + "\n")


def make_folder(out: Path) -> None:
    """Make a folder for results."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeirError(
            f"cannot make the folder {out}: {error.strerror}. Choose another folder."
        ) from None


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raise a WeirError if the block cannot write to a file or folder."""
    try:
        yield
    except OSError as error:
        raise WeirError(f"cannot write to {out}: {error.strerror}") from None


def say(text: str) -> None:
    """Print one line to standard error, without markup or wrapping."""
    print_line(text, messages())


LONG_WAIT = 5.0
"""Seconds after which a line is printed about work in progress."""


KERNELS = "preparing kernels (each is compiled when first used, and kept for later runs)"
"""The line that a command prints if it has to wait for kernels before the model's first call. Each
command can print it, because commands use different kernels.
"""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show that work of unknown duration is in progress. Without a terminal, print a line if the
    work takes longer than `LONG_WAIT`.
    """
    late = threading.Timer(LONG_WAIT, say, [f"{what} …"])
    late.daemon = True
    if in_lines():
        late.start()
    try:
        with messages().status(f"{what} …"):
            yield
    finally:
        late.cancel()


def in_lines() -> bool:
    """Return whether progress is printed in lines, because standard error is not a terminal."""
    return not messages().is_interactive


def say_window(model: PreTrainedModel, policy: Policy, chunk: int) -> None:
    """Warn if a policy may hold more tokens at once than the model's window."""
    from weir.cache import describe_window_excess, fit_to_model

    fitted = fit_to_model(policy, model, chunk)
    if (warning := describe_window_excess(model, fitted, chunk)) is not None:
        say(warning)


def say_steps(steps: dict[str, str | None]) -> None:
    """Report why no engine runs the decode steps; print nothing if one does.

    `steps` comes from a stream's report. While the kernel of native steps is being compiled,
    nothing is printed, because the first step reports that.
    """
    from weir.native import UNFINISHED

    if steps["run"] == "eager" and steps["reason"] != UNFINISHED:
        say(f"decode steps run in PyTorch, not natively, which is slower: {steps['reason']}")


def say_set_aside(
    model: PreTrainedModel | str, policy: str | None, slots: str | None, revision: str | None = None
) -> None:
    """Report that the model's policy file is ignored because of `--slots`."""
    if policy is not None or slots is None:
        return
    from weir.cache import FILE
    from weir.models import sidecar_path

    if (file := sidecar_path(model, FILE, revision)) is not None:
        say(
            f"--slots replaces the policy file {file} next to the model with the default policy. "
            "To use the file with these slots, which works only if its slots are exact, pass "
            f"--policy {file} --slots {slots}."
        )


def prepare_model(
    model: PreTrainedModel, *, native: bool = True, compiled: bool = False, wait: bool = False
) -> None:
    """Prepare a model for fast decode steps.

    Chooses the faster matrix products, weir's or PyTorch's. This takes seconds, once per machine.
    With `native`, decode steps run in one call of a kernel if the model's form allows it; with
    `compiled`, on a GPU, they run under torch.compile.

    With `wait`, the first step waits until this kernel has been compiled, and with `compiled` too,
    steps that cannot be compiled raise a WeirError. Without `wait`, a thread compiles the kernel
    and holds numba's lock, so a stream that needs another kernel would wait in the middle of its
    work.
    """
    from weir.native import choose_products, compile_steps

    with waiting("timing matrix products"):
        if native or compiled:
            compile_steps(model, torch_compile=compiled, strict=wait)
        else:
            choose_products(model)


def describe_parameters(make: Any) -> str:
    """Return the parameters of a policy, pool or task with their defaults."""
    return ", ".join(
        name if p.default is p.empty else f"{name}={format_value(p.default)}"
        for name, p in inspect.signature(make).parameters.items()
    )


def first_paragraph(make: Any) -> str:
    """Return the first paragraph of a docstring as one line."""
    return " ".join((inspect.getdoc(make) or "").split("\n\n")[0].split())


@contextmanager
def show_progress(what: str, total: float | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar with one row. The block calls the yielded function with changes."""
    with progress() as bar:
        yield partial(bar.update, bar.add_task(what, total=total, note=""))


def progress() -> Progress:
    """Return a progress bar on standard error, hidden unless that is a terminal."""
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
