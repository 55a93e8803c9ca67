"""The text a task streams: the books of a file, one after the other, as token ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.evals.reading import encode
from weir.load import ASSETS
from weir.text import read_books

PACKAGED = ASSETS / "war-and-peace.txt.xz"
"""The text that comes with weir: the beginning of *War and Peace*."""


@dataclass(frozen=True)
class Books:
    """Books as one stream.

    Attributes:
        ids: all of it [tokens]; the start token stands in front of the first book only.
        edges: where books begin, and the end of the last.
    """

    ids: Tensor
    edges: tuple[int, ...]

    def pieces(self, most: int) -> Iterator[Tensor]:
        """The stream in pieces of `most` tokens; one that would run into the next book is shorter.

        Books thus end where pieces do.
        """
        for begin, end in pairwise(self.edges):
            yield from self.ids[begin:end].split(most)


def read_stream(
    tokenizer: PreTrainedTokenizerBase,
    path: str | None = None,
    most: int | None = None,
    start: str | None = None,
) -> Books:
    """The books of a file, concatenated as StreamingLLM does with PG-19.

    Args:
        tokenizer: of the model that will read.
        path: the file, plain or `.xz`, its books parted by lines that hold a NUL byte; None for the
            packaged book.
        most: at most so many tokens.
        start: stands in front in place of the start token.

    Raises:
        WeirError: no file is named, it cannot be read, or makes no tokens to predict.
    """
    if path == "":
        raise WeirError("no text is named: give the path of a file, or leave text out")
    parts: list[Tensor] = []
    edges = [0]
    for book in read_books(path or PACKAGED):
        left = None if most is None else most - edges[-1]
        if left is not None and left < 1:
            break
        if parts:
            # A blank line between the books, and no start token: the stream goes on.
            ids = encode(tokenizer, "\n\n" + book, left, start="")
        else:
            ids = encode(tokenizer, book, left, start)
        parts.append(ids)
        edges.append(edges[-1] + len(ids))
    return Books(torch.cat(parts), tuple(edges))
