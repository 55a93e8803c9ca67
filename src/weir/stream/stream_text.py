"""The text of a stream without turns, which is archived as it is fed."""

from __future__ import annotations

import warnings

from transformers import PreTrainedTokenizerBase

from weir.stream.archive import Archive, ArchiveProblem
from weir.stream.detokenizer import Detokenizer
from weir.stream.inputs import NO_ID

MOST_OPEN = 2048
"""Largest number of tokens that wait for a line break before they are archived."""


class StreamText:
    """Converts tokens that a stream has read to lines of text, and adds the lines to an archive.

    Args:
        archive: the archive that gets the text.
        seen: number of tokens that the stream has already read.

    Attributes:
        archive: the archive; None once it can no longer be used, which is reported as a Python
            warning.
    """

    def __init__(self, archive: Archive, tokenizer: PreTrainedTokenizerBase, seen: int) -> None:
        self.archive: Archive | None = archive
        self._tokenizer = tokenizer
        self._start = self._place = seen
        self._open = ""
        self._words = Detokenizer(tokenizer)
        try:
            archive.resume(seen)
        except ArchiveProblem as error:
            self._lose(error)

    def add(self, ids: list[int]) -> None:
        """Add tokens that were read, and archive the lines that they complete."""
        if self.archive is None:
            return
        lines: list[str] = []
        start = self._start
        for token in ids:
            self._place += 1
            if token != NO_ID:  # an embedding has no text
                self._open += self._words.add(token)
            if "\n" in self._open or self._place - self._start >= MOST_OPEN:
                lines.append(self._open)
                self._open, self._start = "", self._place
        if lines:
            self._archive("".join(lines), start, self._start)

    def flush(self) -> None:
        """Archive the text after the last line break, too."""
        if self._open:
            text, self._open = self._open, ""
            self._archive(text, self._start, self._place)
            self._start = self._place

    def _archive(self, text: str, start: int, stop: int) -> None:
        if self.archive is None:
            return
        try:
            self.archive.add("text", text, start=start, stop=stop)
        except ArchiveProblem as error:
            self._lose(error)

    def _lose(self, error: ArchiveProblem) -> None:
        self.archive = None
        warnings.warn(f"{error} The stream goes on, but recalls nothing from now on.", stacklevel=4)
