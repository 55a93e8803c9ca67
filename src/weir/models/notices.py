"""Notices on standard error about things that take long or do not work here."""

from __future__ import annotations

import sys


def say(sentence: str) -> None:
    """Write a notice to standard error."""
    write(sentence)


_SAID: set[str] = set()
"""Notices that `say_once` has written in this process."""


def say_once(sentence: str) -> None:
    """Write a notice to standard error, unless this process has written it before."""
    if sentence not in _SAID:
        _SAID.add(sentence)
        write(sentence)


def write(sentence: str) -> None:
    """Write a line to standard error and flush it."""
    sys.stderr.write(f"weir: {sentence}\n")
    sys.stderr.flush()
