"""Text into tokens: control tokens only where the template puts them, long texts in pieces.

A tokenizer takes `<|im_end|>` for the control token also in what a user says, who could end the
turn with it and speak as the system. So such texts are marked before the template is rendered, and
the text is cut at the marks before it is tokenized.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any

from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError

MARK = "\ufdd0"
"""Put into control tokens that stand in a message; Unicode keeps this character for such uses."""
PIECE = 16_384
"""Characters that are tokenized at once. Longer texts would take memory, and hold up threads."""
SLACK = 64
"""Tokens by which cutting a text in two may change their number."""
SEVERAL = 256
"""Short texts between marks that are tokenized together."""
LONGEST = 512
"""Characters of a control token; the longest that is known has some thirty."""
WINDOW = 65_536
"""Characters that are searched at once: no other thread runs meanwhile."""
_BREAK = re.compile(r"(?<=[^\W\d_]) (?=[^\W\d_])")
"""A space between two letters: tokens of usual tokenizers begin there."""


class PromptTooLong(WeirError):
    """A prompt has more tokens than one may have."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"that is more than the {most:,} tokens that one request may feed; send the rest in "
            "further turns"
        )


class PromptEncoder:
    """Tokenizes prompts for one model, of `most` tokens if not None. Called from any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._most = most
        self._one_piece = threading.Lock()  # long texts take turns, short ones do not wait
        # Only tokenizers in Python need one thread at a time.
        self._lock = None if getattr(tokenizer, "is_fast", False) else threading.Lock()
        known = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in known if token.special}
        template = str(tokenizer.chat_template or "")
        others = {token.content for token in known} - special
        named = {text for text in others if text in template and re.search(r"[^\w\s]", text)}
        self._special = _pattern(special)
        self._named = _pattern(special | named)
        self._ends: tuple[list[int], list[int]] | None = None
        self._cuts: bool | None = None

    def mark(self, value: Any, *, trusted: bool = False) -> Any:
        """Mark the control tokens in all texts of a value of JSON.

        `trusted` texts may have tokens that only the template makes control tokens, such as
        `<think>`.
        """
        if isinstance(value, str):
            pattern = self._special if trusted else self._named
            while pattern is not None and (cuts := list(_find_cuts(pattern, value))):
                parts = zip([0, *cuts], [*cuts, len(value)], strict=True)
                value = MARK.join(value[start:end] for start, end in parts)
            return value
        if isinstance(value, dict):
            return {
                self.mark(name, trusted=trusted): self.mark(each, trusted=trusted)
                for name, each in value.items()
            }
        if isinstance(value, list):
            return [self.mark(each, trusted=trusted) for each in value]
        return value

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokenize a text, apart where there are marks; PromptTooLong if it has more tokens than it
        may.

        `special` adds the tokens that the tokenizer puts around a text, such as a start token.
        """
        if special and MARK not in text and len(text) <= PIECE:
            return self._checked(self._encode(text, special=True))
        ids: list[int] = []
        parts = list(filter(None, text.split(MARK)))
        for at in range(0, len(parts), SEVERAL):
            several = parts[at : at + SEVERAL]
            if max(map(len, several)) <= PIECE // SEVERAL:
                ids += chain.from_iterable(self._encode(several))
            else:
                for part in several:
                    ids += self._encode_long(part, len(ids))
            self._checked(ids)
        if special:
            before, after = self._around()
            ids = [*before, *ids, *after]
        return self._checked(ids)

    def _encode_long(self, text: str, before: int) -> list[int]:
        """Tokenize a long text in pieces, after so many tokens of the same prompt."""
        if len(text) <= PIECE:
            return self._encode(text)
        ids: list[int] = []
        same: dict[int, int] = {}  # one object for each token, or ids take 40 bytes in place of 8
        for number, piece in enumerate(_pieces(text)):
            with self._one_piece:
                some = self._encode(piece)
            ids += map(same.setdefault, some, some)
            if self._most is not None and before + len(ids) > self._most + SLACK * number:
                raise PromptTooLong(self._most)
        if not self._may_cut():
            with self._one_piece:
                ids = self._encode(text)
        return ids

    def _may_cut(self) -> bool:
        """Whether the tokens of a text are those of its parts, cut in front of a word."""
        if self._cuts is None:
            parts = [self._encode("one"), self._encode(" word")]
            self._cuts = self._encode("one word") == [*parts[0], *parts[1]]
        return self._cuts

    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts before and after a text."""
        if self._ends is None:
            plain, whole = self._encode("x"), self._encode("x", special=True)
            starts = range(len(whole) - len(plain) + 1)
            at = next((n for n in starts if whole[n : n + len(plain)] == plain), len(whole))
            self._ends = whole[:at], whole[at + len(plain) :]
        return self._ends

    def _encode(self, text: str | list[str], *, special: bool = False) -> list[Any]:
        with self._lock or nullcontext():
            return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])

    def _checked(self, ids: list[int]) -> list[int]:
        if self._most is not None and len(ids) > self._most:
            raise PromptTooLong(self._most)
        return ids


def _find_cuts(pattern: re.Pattern[str], text: str) -> Iterator[int]:
    """Where to cut a text so that nothing matches a pattern: after the first letter of a match."""
    after = 0
    for start in range(0, len(text), WINDOW):
        for found in pattern.finditer(text, max(start, after), start + WINDOW + LONGEST):
            if found.start() >= start + WINDOW:
                break
            after = found.end()
            yield found.start() + 1


def _pieces(text: str) -> Iterator[str]:
    """Cut a text, in front of words where there are any near."""
    at = 0
    while len(text) - at > PIECE:
        near = at + PIECE - 1024
        found = _BREAK.search(text, near, at + PIECE)
        end = found.start() if found else at + PIECE
        yield text[at:end]
        at = end
    yield text[at:]


def _pattern(texts: Collection[str]) -> re.Pattern[str] | None:
    """A pattern of any of some texts; those with the same beginning share it. One letter cannot be
    cut.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text if len(text) > 1 else "":
            node = node.setdefault(char, {})
        if len(text) > 1:
            node[""] = {}

    def write(node: dict[str, Any]) -> str:
        more = [re.escape(char) + write(below) for char, below in node.items() if char]
        if not more:
            return ""
        group = more[0] if len(more) == 1 else f"(?:{'|'.join(more)})"
        return f"(?:{group})?" if "" in node else group

    return re.compile(write(tree)) if tree else None
