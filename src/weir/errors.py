"""The errors that weir raises on purpose, and functions that compose their messages.

This file imports only the standard library, so that it can report a missing package.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

LONGEST = 60
"""The most characters of a value that an error message quotes. `PolicyError` quotes up to this many
on each side of the character that the error is about.
"""
EXTRAS = {
    "accelerate": "train",
    "fastapi": "serve",
    "gguf": "gguf",
    "jiter": "serve",
    "llguidance": "serve",
    "lm_eval": "eval",
    "matplotlib": "plots",
    "numba": "fast",
    "PIL": "images",
    "prometheus_client": "serve",
    "ray": "cluster",
    "rich": "cli",
    "rouge_score": "eval",
    "sacrebleu": "eval",
    "sklearn": "inspect",
    "starlette": "serve",
    "torchao": "quant",
    "triton": "gpu",
    "typer": "cli",
    "uvicorn": "serve",
}
"""The extra of weir that installs an optional package, by the package's name in an import."""


def in_words(count: int, noun: str) -> str:
    """Format a number of things: `1 layer`, `1,024 layers`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class WeirError(Exception):
    """Invalid input to weir, or a failure such as a full disk; the message says what is wrong."""


class PolicyError(WeirError):
    """A policy that cannot be parsed, or makes no sense.

    Attributes:
        text: the policy as it was given.
        at: the character the error is about, counted from 0.
    """

    def __init__(self, problem: str, text: str, at: int) -> None:
        line = "".join(c if c.isprintable() else " " for c in text)
        before, after = line[:at], line[at:]
        if len(before) > LONGEST:
            before = f"…{before[-LONGEST:]}"
        if len(after) > LONGEST:
            after = f"{after[:LONGEST]}…"
        super().__init__(f"{problem} (character {at + 1}: {before}»{after})")
        self.text = text
        self.at = at


class TooLargeError(WeirError):
    """A model that takes more memory than is free on this machine."""


class NotFiniteError(WeirError):
    """A model computed infinities or NaN from tokens; the tokens were taken back.

    Attributes:
        layer: the layer whose keys or values are infinite or NaN; None if nothing is cached and the
            logits are NaN.
        row: the row of the batch; None if there is only one row, or if the row is not known.
        place: index in the call, from 0, of the first token for which a number is infinite or NaN;
            None if it is not known.
        token: the id of this token; None if it is not known.
    """

    def __init__(
        self,
        layer: int | None,
        *,
        row: int | None = None,
        place: int | None = None,
        token: int | None = None,
        from_there: bool = False,
        others: bool = False,
    ) -> None:
        """Compose the message.

        Args:
            layer, row, place, token: as in the attributes.
            from_there: whether the tokens before `place` were accepted.
            others: whether the tokens of other rows were accepted.
        """
        named = "" if token is None else f" (id {token})"
        whose = "" if row is None else f" of row {row}"
        made = "the model computed logits that are not numbers (NaN)"
        if layer is not None:
            made = f"layer {layer} of the model computed keys or values that are infinite or NaN"
        if from_there and place is not None:
            what = f"token {place + 1} of this call{named}{whose} and the tokens after it"
        else:
            what = f"the tokens of this call{whose}"
            if place is not None:
                made += f", first for token {place + 1}{named}"
        stream = "stream" if row is None else "row"
        more = ", and the tokens of the other rows were accepted" if others else ""
        super().__init__(
            f"{what} were refused: {made}; the {stream} is as it was before these tokens{more}"
        )
        self.layer = layer
        self.row = row
        self.place = place
        self.token = token


def describe_missing(what: str, module: str, *, reason: str = "", extra: str | None = None) -> str:
    """Compose the message that an optional package is missing, with the command that installs it.

    weir is installed from a clone: no package index has it.

    Args:
        what: the feature that needs the package; it begins the sentence.
        module: the module that could not be imported; the part before the first dot is its package.
        reason: why an installed package cannot be imported.
        extra: the extra of weir that installs the package; by default, the one in `EXTRAS`.
    """
    package = module.partition(".")[0]
    state = f"cannot be imported ({reason})" if reason else "is not installed"
    extra = extra or EXTRAS[package]
    return f"{what} needs {package}, which {state}: pip install '.[{extra}]' in a clone of weir"


def find_nearest(word: str, names: Iterable[str]) -> str | None:
    """Find the name that a misspelt word most likely means, ignoring case; None if none is near."""
    known = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower(), known, 1)
    return known[found[0]] if found else None


def suggest(word: str, words: Iterable[str]) -> str:
    """Compose ", did you mean 'WORD'?" for the closest of some words; empty if none is close."""
    found = find_nearest(word, words)
    return "" if found is None else f", did you mean {found!r}?"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its type if there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def format_value(value: Any) -> str:
    """Format a value as policies write it: `false` and `none`, not `False` and `None`."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def format_size(nbytes: float) -> str:
    """Format a number of bytes: 1.2 MB."""
    power = next((n for n in range(4) if abs(nbytes) < 1000 ** (n + 1)), 4)
    return f"{nbytes / 1000**power:,.{min(power, 1)}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def quote(value: Any) -> str:
    """Quote a value in an error message, on one line, and cut if it is long."""
    text = repr(value) if isinstance(value, str) else format_value(value)
    return shorten(" ".join(text.split()))


def shorten(text: str) -> str:
    """Cut a text to `LONGEST` characters, with … in place of what is left out."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
