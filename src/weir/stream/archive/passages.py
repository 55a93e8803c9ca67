"""Passages: the pieces of a text that are indexed and found. They end where sentences end, except
in a sentence that is too long for one passage.

The passages of a text, joined in order, are the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

PASSAGE = 400
"""Largest number of characters in a passage, without white space at its end."""
_END = re.compile(
    r"""
    (?<! [.!?…‽] ) [.!?…‽]+ ["'”’»)\]]* (?= \s ) \s*  # a sentence ends, and white space follows
    | [。！？｡؟।॥။]+ ["”’」』）]* \s*                     # a sentence ends, white space or not
    | \n \s*                                           # a line ends
    """,
    re.VERBOSE,
)
_SPACE = re.compile(r"\s+")


def cut_sentences(text: str) -> list[str]:
    """Cut a text after each sentence and line. White space after a sentence belongs to it."""
    ends = [found.end() for found in _END.finditer(text)]
    starts = [0, *ends]
    return [text[a:b] for a, b in zip(starts, [*ends, len(text)], strict=True) if a < b]


def cut_passages(text: str, most: int = PASSAGE) -> list[str]:
    """Cut a text into passages of whole sentences with at most `most` characters. A longer sentence
    is cut between words if possible.
    """
    passages: list[str] = []
    open_ = ""
    for sentence in cut_sentences(text):
        for part in _cut_long(sentence, most):
            # White space at the end does not count.
            if open_ and len((open_ + part).rstrip()) > most:
                passages.append(open_)
                open_ = ""
            open_ += part
    return [*passages, open_] if open_ else passages


def _cut_long(sentence: str, most: int) -> Iterator[str]:
    """Cut a sentence that is longer than a passage."""
    start, last = 0, len(sentence.rstrip())
    while last - start > most:
        spaces = list(_SPACE.finditer(sentence, start + most // 2, start + most + 1))
        end = spaces[-1].end() if spaces else start + most
        yield sentence[start:end]
        start = end
    if start < len(sentence):
        yield sentence[start:]
