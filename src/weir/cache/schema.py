"""What facts that somebody else made may be: tables of kinds, and one sentence for what is not.

A kind is a function that looks at a value and raises `Wrong` with the place of what it found; kinds
are made of kinds. Knows nothing about streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from weir.errors import quote

Kind = Callable[[Any, str], None]
"""Looks at a value, given its place in the facts; raises `Wrong`."""

FARTHEST = 2**53
"""No stream is longer: whole numbers that every reader of JSON takes for what they are."""


class Wrong(Exception):
    """A fact that is not what it has to be; says which, what it should be and what it is."""


@contextmanager
def at(place: str) -> Iterator[None]:
    """Say of what is wrong where it is."""
    try:
        yield
    except Wrong as wrong:
        raise Wrong(f"{place}: {wrong}") from None


def whole(low: int = 0, high: int | None = FARTHEST) -> Kind:
    """A whole number from `low` to `high`; None for no limit."""
    limit = "on" if high is None else f"to {high:,}"

    def check(value: Any, place: str) -> None:
        number = isinstance(value, int) and not isinstance(value, bool)
        if not number or value < low or (high is not None and value > high):
            raise Wrong(f"{place} must be a whole number from {low} {limit}, not {_told(value)}")

    return check


def truth(value: Any, place: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise Wrong(f"{place} must be true or false, not {_told(value)}")


def text(*choices: str) -> Kind:
    """A text, one of the choices if there are any."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, str) or (choices and value not in choices):
            wanted = " or ".join(map(repr, choices)) or "a text"
            raise Wrong(f"{place} must be {wanted}, not {_told(value)}")

    return check


def optional(kind: Kind) -> Kind:
    """None, or what the kind says."""

    def check(value: Any, place: str) -> None:
        if value is not None:
            kind(value, place)

    return check


def list_of(kind: Kind, count: int | None = None) -> Kind:
    """A list of `count` such values; None for any number of them."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, list):
            raise Wrong(f"{place} must be a list, not {_told(value)}")
        if count is not None and len(value) != count:
            raise Wrong(f"{place} must have {count} entries, not {len(value)}")
        for index, each in enumerate(value):
            kind(each, f"{place}[{index}]")

    return check


def record(**kinds: Kind) -> Kind:
    """Facts by name: all of these and no others."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise Wrong(f"{place or 'what it says'} must be facts by name, not {_told(value)}")
        dot = f"{place}." if place else ""
        for name, kind in kinds.items():
            if name not in value:
                raise Wrong(f"{dot}{name} is missing")
            kind(value[name], f"{dot}{name}")
        for name in value:
            if name not in kinds:
                raise Wrong(f"{dot}{quote(name)} is a fact too many")

    return check


def _told(value: Any) -> str:
    """A value in a few words, whatever it is."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"{len(value)} facts by name"
    return quote(value) if not isinstance(value, int) or abs(value) < 10**30 else "so large a one"
