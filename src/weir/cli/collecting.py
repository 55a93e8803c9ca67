"""Python's collector of garbage while a command starts: what is imported is no garbage.

The libraries make a million objects while they are imported, and the collector walks through all
of them again and again: a sixth of the time to the first word of `weir chat`. Knows no command.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 50_000
"""New objects from one look for garbage to the next, in place of some hundreds or thousands."""
_USUAL = gc.get_threshold()


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Look for garbage seldom in this block, until `started` or `as_usual` is called in it."""
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()


def started() -> None:
    """From here on look for garbage as usual, but not in what there is already.

    To be called when the libraries are imported and the model is loaded, by all that work for long.
    """
    if not gc.get_freeze_count():
        gc.freeze()
    as_usual()


def as_usual() -> None:
    """From here on look for garbage as any program does, for those that time what programs do."""
    gc.set_threshold(*_USUAL)
