"""Reads files of text as token ids: plain or xz-compressed UTF-8, with one or many books in a file.

A byte order mark is dropped, and CR LF at the end of a line is converted to LF.
"""

from __future__ import annotations

import lzma
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.models import ASSETS

BOOK_SEPARATOR = "\n\0\n"
STANDARD_INPUT = "-"


def read_text(path: str | Path) -> str:
    """Read the whole text of a file, plain or `.xz`, or of standard input for `-`, which can be
    read only once.

    Raises WeirError if it is missing, not UTF-8 (naming the byte), damaged or empty.
    """
    if str(path) == STANDARD_INPUT:
        return _decoded(sys.stdin.buffer.read(), Path("standard input"))
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise WeirError(f"cannot read {path}: {error.strerror}") from None
    return _decoded(raw, path)


def _decoded(raw: bytes, path: Path) -> str:
    """Decode the bytes of a file."""
    try:
        text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8")
    except UnicodeDecodeError as error:
        raise WeirError(
            f"{path} is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from None
    except (lzma.LZMAError, EOFError) as error:
        raise WeirError(f"{path} is not a whole .xz file: {error}") from None
    if not text.strip("\0 \t\r\n\ufeff"):
        raise WeirError(f"{path} contains no text")
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def read_books(path: str | Path) -> list[str]:
    """Read the books of a file: one, or several separated by a line with a NUL byte."""
    books = (book.strip("\n") for book in read_text(path).split(BOOK_SEPARATOR))
    return [book for book in books if book]


def encode(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    most: int | None = None,
    start: str | None = None,
) -> Tensor:
    """Return the ids of a text [tokens], at most `most`, with the start token that the tokenizer
    puts in front.

    `start` is a text whose tokens replace the start token; "" for none. Raises WeirError if there
    is no token to predict.
    """
    # For prose, 16 characters for each token are enough. Long runs of spaces or dashes need more.
    size = len(text) if most is None else 16 * most
    options = {"verbose": False, "return_attention_mask": False}
    front: list[int] = []
    if start is not None:
        options["add_special_tokens"] = False
        front = list(tokenizer(start, **options)["input_ids"])
    while True:
        ids = [*front, *tokenizer(text[:size], **options)["input_ids"]]
        if size >= len(text) or (most is not None and len(ids) > most):
            break
        size *= 4
    if len(ids) < 2:
        raise WeirError("the text makes fewer than 2 tokens, so there is nothing to predict")
    return torch.tensor(ids[:most], dtype=torch.int64)


BOOK = ASSETS / "war-and-peace.txt.xz"
"""The text that comes with weir: the beginning of *War and Peace*."""


@dataclass(frozen=True)
class Books:
    """Books as one stream.

    Attributes:
        ids: all tokens [tokens]; only the first book has the start token in front.
        edges: where each book begins, and the end of the last.
    """

    ids: Tensor
    edges: tuple[int, ...]

    def pieces(self, most: int) -> Iterator[Tensor]:
        """Yield the stream in pieces of at most `most` tokens; a piece also ends where a book
        ends.
        """
        for begin, end in pairwise(self.edges):
            yield from self.ids[begin:end].split(most)


def read_stream(
    tokenizer: PreTrainedTokenizerBase,
    path: str | None = None,
    most: int | None = None,
    start: str | None = None,
) -> Books:
    """Read the books of a file as one stream, like StreamingLLM with PG-19; at most `most` tokens.

    Without a path, the packaged excerpt is read. `start` is as for `encode`. Raises WeirError if
    the file cannot be read, or has no tokens to predict.
    """
    if path == "":
        raise WeirError("no text was given. Give the path of a file, or leave out the text.")
    if most is not None and most < 2:
        raise WeirError(f"most must be at least 2 tokens, got {most}")
    parts: list[Tensor] = []
    edges = [0]
    for book in read_books(path or BOOK):
        left = None if most is None else most - edges[-1]
        if left is not None and left < 1:
            break
        if parts:
            # There is a blank line between the books, and no start token, because the stream
            # continues.
            ids = encode(tokenizer, "\n\n" + book, left, start="")
        else:
            ids = encode(tokenizer, book, left, start)
        parts.append(ids)
        edges.append(edges[-1] + len(ids))
    return Books(torch.cat(parts), tuple(edges))
