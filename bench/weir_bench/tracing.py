"""A trace of what is timed: every operation of one step of each contender, for a viewer.

The file is in Chrome's format, which Perfetto (https://ui.perfetto.dev) opens. Knows nothing about
what is timed; where nobody asked for a trace nothing is slowed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from weir.errors import WeirError

_TRACED: ContextVar[list[dict[str, Any]] | None] = ContextVar("traced", default=None)
"""The traces so far, where somebody asked for them."""


@contextmanager
def traced(path: Path | None) -> Iterator[None]:
    """Write a trace of what is measured meanwhile; None for no trace.

    Raises:
        WeirError: the file cannot be written, which is found at once.
    """
    if path is None:
        yield
        return
    _write(path, [])
    made: list[dict[str, Any]] = []
    token = _TRACED.set(made)
    try:
        yield
    finally:
        _TRACED.reset(token)
        _write(path, made)


def tracing() -> bool:
    """Whether somebody asked for a trace."""
    return _TRACED.get() is not None


def trace(name: str, do: Callable[[], object]) -> None:
    """Do something once more under the profiler, with its name above it, if a trace was asked for.

    Without gradients, as everything that is timed.
    """
    made = _TRACED.get()
    if made is None:
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch.no_grad(), profile(activities=activities) as seen, record_function(name):
        do()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        made.append(json.loads(path.read_text("utf-8")))


def _write(path: Path, made: list[dict[str, Any]]) -> None:
    """All traces as one; they share a clock."""
    events = [event for each in made for event in each["traceEvents"]]
    whole = {**(made[0] if made else {}), "traceEvents": events}
    try:
        path.write_text(json.dumps(whole), "utf-8")
    except OSError as error:
        raise WeirError(f"cannot write the trace {path}: {error.strerror}") from None
