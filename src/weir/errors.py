"""The errors weir raises on purpose, one sentence a user can act on; and how values stand in it.

Imports nothing that has to be installed, so that it can say what is missing.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

LONGEST = 60
"""Characters of a value that an error repeats."""
EXTRAS = {
    "accelerate": "train",
    "fastapi": "serve",
    "llguidance": "serve",
    "lm_eval": "eval",
    "matplotlib": "plots",
    "numba": "fast",
    "PIL": "images",
    "prometheus_client": "serve",
    "pydantic": "serve",
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
"""Which of weir's extras brings a package that weir can do without, by its name in an import."""


class WeirError(Exception):
    """Something given to weir cannot be used; the message says what, and what to do instead."""


class PolicyError(WeirError):
    """A policy that cannot be read, or makes no sense.

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


class NotFiniteError(WeirError):
    """What a model made of tokens is infinite or no number; the tokens were taken back.

    Attributes:
        layer: the layer that made such keys or values; None where nothing is cached, and it is the
            logits that are no numbers.
        row: the row of the batch; None where there is one row only, or it is not known.
        place: which token of the call, counted from 0; None where it is not known.
        token: its id; None where it is not known.
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
        """`from_there`: the tokens in front of it were taken in; `others`: other rows went on."""
        named = "" if token is None else f" (id {token})"
        whose = "" if row is None else f" of row {row}"
        made = "the model made logits that are no numbers"
        if layer is not None:
            made = f"layer {layer} of the model made keys or values that are not finite numbers"
        if from_there and place is not None:
            what = f"token {place + 1} of this call{named}{whose} and what comes after it"
        else:
            what = f"the tokens of this call{whose}"
            if place is not None:
                made += f" of token {place + 1}{named}"
        stream = "stream" if row is None else "row"
        more = ", and the other rows took in theirs" if others else ""
        super().__init__(
            f"{what} were refused: {made}; the {stream} is as it was before them{more}"
        )
        self.layer = layer
        self.row = row
        self.place = place
        self.token = token


def not_installed(what: str, module: str, *, reason: str = "", extra: str | None = None) -> str:
    """What is said where a package is missing that weir can do without.

    The line to type is the README's, in a clone: the `weir` of PyPI is another project.

    Args:
        what: what needs it, as the sentence begins.
        module: what could not be imported; its package comes before the first dot.
        reason: what is wrong with one that is there.
        extra: of weir's extras, the one that brings it; by `EXTRAS` if not given.
    """
    package = module.partition(".")[0]
    state = f"cannot be imported ({reason})" if reason else "is not installed"
    extra = extra or EXTRAS[package]
    return f"{what} needs {package}, which {state}: pip install '.[{extra}]' in the clone of weir"


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that a word was most likely meant for, in whatever case; None if none is near."""
    known = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower(), known, 1)
    return known[found[0]] if found else None


def near(word: str, words: Iterable[str]) -> str:
    """A hint at the nearest of some words, for the middle of a sentence; empty if none is near."""
    found = nearest(word, words)
    return "" if found is None else f", did you mean {found!r}?"


def written(value: Any) -> str:
    """A value as it stands in a policy: `false` and `none`, not `False` and `None`."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def shown(value: Any) -> str:
    """A value as an error repeats it, cut where it is long."""
    text = repr(value) if isinstance(value, str) else written(value)
    return shortened(" ".join(text.split()))


def shortened(text: str) -> str:
    """The beginning of a text, with … for what is left out; all of one that is not long."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
