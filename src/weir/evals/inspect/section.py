"""What a section of `weir inspect` is given, and what it gives back.

A section is a file of this room with one public function,

    def section(asked: Asked) -> Section

which `run.SECTIONS` has under the section's name. It computes, draws its pictures with `drawing`,
and returns a `Section`; it prints nothing and writes no file. What it cannot do for a model or a
text it says as a `WeirError` of one sentence: the page then carries the sentence in the section's
place, and the other sections go on. matplotlib, and what an extra brings, are imported inside
functions.

- Layers and heads come checked: they exist. Heads are query heads; a section about keys or values
  shows the KV heads that they read (`Asked.kv_heads`).
- A picture holds one thought, has labeled axes with units, and is drawn 5.2 inches wide, so that
  its letters can be read on a phone.
- All text on the page is escaped by the page, but for a `fragment`, whose author escapes it.

Knows nothing about models, nor what is on a page beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.models import ModelSink, sink_of
from weir.stream import encode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 5.2
"""Inches; on a phone's screen letters of 9 points are then about as large as small print."""


def _nothing(done: int, of: int) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Asked:
    """What is to be looked at.

    Attributes:
        model: a causal language model, or an encoder (which weir does not stream: `describe`
            and whatever makes a cache refuse it in a sentence).
        tokenizer: of the model.
        name: the model as it was asked for.
        text: the whole text.
        layers: which layers, from 0 on; None for those that a section thinks best.
        heads: which query heads, from 0 on; None for all, or those that a section thinks best.
        policy: a policy as text; None where none was named.
        sequences: how many short sequences are averaged over, at most.
        length: tokens in each of them.
        tokens: how many tokens are read in one go where a long text is read, at most; None for
            what a section thinks best.
        moments: after how many tokens it is looked at what a policy keeps; None for what shows
            best.
        seed: of all random draws.
        on_step: told how many steps of a section are done, and of how many; for a progress bar.
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
    on_step: Callable[[int, int], None] = _nothing

    def ids(self, most: int | None = None) -> Tensor:
        """The text as weir reads it: [tokens], int64, `most` at most.

        In front are the start token and the tokens of a learned sink, where the model has such.

        Raises:
            WeirError: the text makes fewer than 2 tokens.
        """
        ids = encode(self.tokenizer, self.text, most)
        return torch.tensor(self.sink.first(ids.tolist())[:most], dtype=torch.int64)

    @property
    def sink(self) -> ModelSink:
        """The attention sink that the model was trained with."""
        return sink_of(self.model.config)

    def kv_heads(self, group: int) -> tuple[int, ...] | None:
        """The KV heads that the chosen heads read; None where none were chosen.

        Args:
            group: how many query heads share a KV head.
        """
        if self.heads is None:
            return None
        return tuple(dict.fromkeys(head // group for head in self.heads))


@dataclass(frozen=True)
class Picture:
    """A picture of a section.

    Attributes:
        name: its file without ending, unlike that of any other section: `maps`, `keys-layer-0`.
        figure: from `drawing`.
        alt: a sentence for those who do not see it.
    """

    name: str
    figure: Figure
    alt: str


@dataclass(frozen=True)
class Table:
    """A table of a section; the first column is a row's name.

    Attributes:
        heads: of the columns.
        rows: cells as they are to be read.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: `maps`; the anchor on the page, and the key in `--json`.
        title: its heading.
        text: a paragraph that says what is shown and how it was measured, with the paper's figure.
        pictures: in order.
        table: figures to be read, if any.
        facts: the figures for `--json`: what `json` can write; NaN and infinities become null.
        fragment: HTML that stands below the pictures; everything from a text escaped.
        style: CSS for the fragment. The page is light or dark by `prefers-color-scheme`, with the
            custom properties `--ink`, `--paper`, `--gray` and `--line`.
    """

    name: str
    title: str
    text: str
    pictures: tuple[Picture, ...] = ()
    table: Table | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    fragment: str = ""
    style: str = ""


@contextmanager
def drawing(height: float, width: float = WIDTH) -> Iterator[Figure]:
    """A figure to draw into, with the letters of all pictures; no display is needed.

    Args:
        height, width: in inches.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 10, "axes.titlesize": 10, "axes.labelsize": 10}):
        yield Figure(figsize=(width, height), layout="constrained", facecolor="white")
