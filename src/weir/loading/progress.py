"""The progress of loading a model, as one bar on one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging


@contextmanager
def loading_bar(what: str, total: int) -> Iterator[Callable[[int], Any]]:
    """Show a bar on a terminal while a file is read, unless transformers' bars are disabled.

    The block calls the yielded function with the number of bytes that were read.
    """
    with logging.tqdm(
        total=total,
        desc=f"Loading {what}",
        unit="B",
        unit_scale=True,
        leave=False,
        disable=None,  # None disables the bar unless standard error is a terminal.
    ) as bar:
        yield bar.update
