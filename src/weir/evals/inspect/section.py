"""The input and output of a section of `weir inspect`, and the passages that sections read.

A section is a function `section(asked: Inspection) -> Section` in a file of this folder, listed in
`page.SECTIONS`. It computes, draws its pictures with `drawing`, and returns a `Section`; it prints
nothing and writes no file. If the model or text makes the section impossible, it raises a
`WeirError` with one sentence. The page shows the sentence instead of the section, and the other
sections continue. matplotlib and optional packages are imported inside functions.

- Layers and heads have been checked to exist. Heads are query heads; a section about keys or values
  shows the KV heads that they read (`Inspection.kv_heads`).
- A picture has labeled axes with units and is 5.2 inches wide, so that a phone shows it readably.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.evals.report import TextTable
from weir.models import ModelSink, sink_of, window_of
from weir.stream import encode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 5.2
"""Width of a picture in inches. On a phone, letters of 9 points are then about the size of small
print.
"""


@dataclass(frozen=True)
class Inspection:
    """A model, a text, and the layers, heads and tokens to look at.

    Attributes:
        model: a causal language model, or an encoder. weir does not stream encoders: `describe`,
            and everything that makes a cache, refuse them.
        tokenizer: of the model.
        name: name of the model, as given.
        text: the whole text.
        layers: indices of layers, from 0; None for the section's default.
        heads: indices of query heads, from 0; None for all, or the section's default.
        policy: a policy as text; None if none was named.
        sequences: maximum number of short sequences to average over.
        length: tokens in each of these sequences.
        tokens: maximum number of tokens to read in one go from a long text; None for the section's
            default.
        moments: token counts at which to look at what a policy keeps; None for the default.
        seed: seed of all random draws.
        on_step: called with the steps of a section done and in all, for a progress bar.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    text: str
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    policy: str | None = None
    sequences: int = 256
    length: int = 16
    tokens: int | None = None
    moments: tuple[int, ...] | None = None
    seed: int = 0
    on_step: Callable[[int, int], None] = lambda done, of: None

    def ids(self, most: int | None = None) -> Tensor:
        """Token ids of the text as weir reads it: [tokens], int64, at most `most`.

        In front are the start token and the tokens of a learned sink, if the model has them.
        """
        ids = encode(self.tokenizer, self.text, most)
        return torch.tensor(self.sink.first(ids.tolist())[:most], dtype=torch.int64)

    @property
    def sink(self) -> ModelSink:
        """The attention sink that the model was trained with."""
        return sink_of(self.model.config)

    def kv_heads(self, group: int) -> tuple[int, ...] | None:
        """Return the KV heads that the chosen query heads read; `group` query heads share one. None
        if none were chosen.
        """
        if self.heads is None:
            return None
        return tuple(dict.fromkeys(head // group for head in self.heads))


@dataclass(frozen=True)
class Picture:
    """A picture of a section.

    Attributes:
        name: unique file name without extension: `maps`, `keys-layer-0`.
        figure, alt: from `drawing`, and the alternative text.
    """

    name: str
    figure: Figure
    alt: str


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: the anchor on the page and the key in `--json`, such as `maps`.
        title: heading of the section.
        text: a paragraph that says what is shown and how it was measured, and cites the paper's
            figure.
        pictures: pictures, in order.
        table: table of numbers, if any.
        facts: JSON-serializable numbers for `--json`; NaN and infinities become null.
        fragment: HTML below the pictures; everything from a text must be escaped.
        style: CSS for the fragment. The page is light or dark by `prefers-color-scheme`, with the
            custom properties `--ink`, `--paper`, `--gray` and `--line`.
    """

    name: str
    title: str
    text: str
    pictures: tuple[Picture, ...] = ()
    table: TextTable | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    fragment: str = ""
    style: str = ""


@contextmanager
def drawing(height: float) -> Iterator[Figure]:
    """Provide a figure `WIDTH` by `height` inches to draw into; needs no display."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 10, "axes.titlesize": 10, "axes.labelsize": 10}):
        yield Figure(figsize=(WIDTH, height), layout="constrained", facecolor="white")


def style_panel(axes: Axes) -> None:
    """Add horizontal grid lines behind the data, and remove the frame above and to the right."""
    axes.grid(axis="y", color="#e3e7ea", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


SHORTEST = 8
"""Smallest number of tokens of a sequence; shorter ones show nothing."""
MOST_TOKENS = 4096
"""Largest number of tokens of a passage, because all inputs of a layer for one passage are held in
memory.
"""
_END = re.compile(r"(?<=[.!?…。！？])[\"'”’»)]*\s+|(?<=[。！？])|\n\s*\n")
_QUIET = {"verbose": False, "return_attention_mask": False}


def sentences(asked: Inspection, count: int, length: int) -> Tensor:
    """The first `count` sentences that have at least `length` tokens, cut to `length` tokens
    [sentences, length].

    If the text has fewer such sentences, and can be cut into more pieces of `length` tokens, the
    pieces are returned instead. Tokens of a learned sink come first. Special tokens that are put
    around any text count as tokens.

    Raises WeirError if `length` has no room for text, or if the text is too short for one piece.
    """
    _put_around(asked, length)
    found: list[list[int]] = []
    parts = [part for part in _END.split(asked.text) if part and part.strip()]
    # In steps, because a text can be huge.
    for begin in range(0, len(parts), 4 * count):
        some = [part[: 64 * length] for part in parts[begin : begin + 4 * count]]
        rows = asked.tokenizer(some, truncation=True, max_length=length, **_QUIET)["input_ids"]
        found += [asked.sink.first(row)[:length] for row in rows if len(row) == length]
        if len(found) >= count:
            return torch.tensor(found[:count])
    others = pieces(asked, count, length)
    return others if len(others) > len(found) else torch.tensor(found)


def pieces(asked: Inspection, count: int, length: int) -> Tensor:
    """Pieces of a text, one after the other; arguments and result are those of `sentences`."""
    front, back = _put_around(asked, length)
    own = length - len(front) - len(back)
    ids = encode(asked.tokenizer, asked.text, own * count, start="").tolist()
    if len(ids) < own:
        raise WeirError(
            f"the text is too short to inspect: it has {len(ids) + length - own} tokens, and "
            f"sequences of {length} are needed. Use a longer text."
        )
    starts = range(0, len(ids) - own + 1, own)
    return torch.tensor([[*front, *ids[begin : begin + own], *back] for begin in starts])


def _put_around(asked: Inspection, length: int) -> tuple[list[int], list[int]]:
    """The ids, with those of a learned sink, that are put before and after any text; WeirError if
    they leave no room in `length` tokens.
    """
    front, back = around(asked.tokenizer)
    front = asked.sink.first(front)
    if (own := len(front) + len(back)) >= length:
        raise WeirError(
            f"sequences of {length} tokens have no room for text, because {own} tokens are put "
            f"around each text. Use a length of at least {own + 1}."
        )
    return front, back


def around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer puts before and after any text, such as a start token."""
    plain = list(tokenizer("a", add_special_tokens=False, **_QUIET)["input_ids"])
    full = list(tokenizer("a", **_QUIET)["input_ids"])
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return full[:at], full[at + len(plain) :]
    return [], []


def fixed_tokens(ids: Tensor, tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Special tokens that all sequences [sequences, length] have at one position, by position."""
    special = set(tokenizer.all_special_ids)
    return {
        place: str(tokenizer.convert_ids_to_tokens(int(column[0])))
        for place, column in enumerate(ids.T)
        if int(column[0]) in special and bool((column == column[0]).all())
    }


def longest(asked: Inspection, usual: int) -> int:
    """Return the tokens of the longest passage: the requested number, or by default `usual`,
    limited by the model's window.

    Raises WeirError if more than `MOST_TOKENS` were requested.
    """
    if asked.tokens is None:
        return min(usual, window_of(asked.model.config) or MOST_TOKENS)
    if asked.tokens > MOST_TOKENS:
        raise WeirError(
            f"queries, keys and values of {asked.tokens:,} tokens do not fit in memory together. "
            f"Use at most {MOST_TOKENS:,} tokens."
        )
    return asked.tokens


def passages(asked: Inspection, length: int, count: int, fewest: int) -> Tensor:
    """The first `count` passages of a text [passages, length]; a shorter text is one passage."""
    length = len(encode(asked.tokenizer, asked.text, length))
    if length < fewest:
        raise WeirError(
            f"{length} tokens are too few. Use a text of at least {fewest} tokens, and a --tokens "
            "of at least as many."
        )
    return pieces(asked, count, length)
