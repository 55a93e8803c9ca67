"""Transcript of a conversation: its token ids are appended to a small file, turn by turn.

It tells which turns have left the cache, finds what was said, and lets a conversation continue
without a saved stream. A file has one JSON object per line: first facts about the conversation,
then the turns. If a turn begins before the end of the previous one, the previous turn was
interrupted and is cut there.
"""

from __future__ import annotations

import fcntl
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from weir.cache import Holding
from weir.errors import WeirError
from weir.stream.detokenizer import Detokenizer

FORMAT = 1
Shares = np.ndarray[Any, np.dtype[np.float64]]
SHOWN = 80
"""Number of characters of each turn's text that stay in memory."""


@dataclass
class Turn:
    """One turn of a conversation.

    Attributes:
        by_user: whether the user said it; otherwise, the model did.
        start: the place of its first token in the stream.
        text: what was said; in `Transcript.turns`, only the first `SHOWN` characters.
        ids: its tokens, including those of the template.
    """

    by_user: bool
    start: int
    text: str = ""
    ids: array[int] = field(default_factory=lambda: array("I"))

    @property
    def end(self) -> int:
        """The place after its last token."""
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Passage:
    """One exchange, or several consecutive ones that the cache holds entirely or not at all.

    Attributes:
        turns: numbers of the first and last exchange, from 1. As on the server, a message and its
            answer are one turn. (0, 0) for tokens before the first turn (`Transcript.loaded`).
        tokens: number of tokens of these exchanges.
        held: the share of these tokens that still has slots, over all layers and KV heads, 0 to 1.
        text: the beginning of the first message.
    """

    turns: tuple[int, int]
    tokens: int
    held: float
    text: str


@dataclass(frozen=True)
class Found:
    """A place where a text was said.

    Attributes:
        turn: number of the exchange, from 1. A message and its answer have the same number.
        by_user: whether the user said it.
        shares: for each of its tokens, the share of layers and KV heads that hold it.
        pools: names of the pools that hold some of it.
    """

    turn: int
    by_user: bool
    shares: tuple[float, ...]
    pools: tuple[str, ...]


class Transcript:
    """The turns of a conversation, which are appended to a file.

    Args:
        path: a new file; None keeps the turns in memory only.
        facts: facts about the conversation, as JSON, that are needed to begin it again.

    Attributes:
        turns: all turns, oldest first; a template's tokens belong to the turn that they were fed
            with.
    """

    def __init__(self, path: Path | None = None, facts: dict[str, Any] | None = None) -> None:
        self.turns: list[Turn] = []
        self.path, self.facts = path, facts or {}
        self._file: IO[bytes] | None = None
        self._unwritten = b""
        if path is not None:
            self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (until `close`)
            _lock(self._file)
            self._append({"weir": FORMAT, **self.facts})

    @classmethod
    def read(cls, path: Path) -> Transcript:
        """Open a transcript to continue it. Raises WeirError if it is damaged, or open in another
        process.
        """
        found = cls()
        found.path, file = path, open(path, "rb+", buffering=0)  # noqa: SIM115
        if not _lock(file):
            file.close()
            raise WeirError(
                f"the conversation in {path} is open in another weir chat. Close that one first."
            )
        try:
            lines = file.read().split(b"\n")
            file.seek(-len(lines.pop()), os.SEEK_END)  # a line that was not completely written
            file.truncate()
            found.facts, *turns = map(json.loads, lines)
            if found.facts.pop("weir", None) != FORMAT:
                raise ValueError("not of this format")
            for turn in turns:
                found._add(Turn(turn["user"], turn["at"], turn["text"], array("I", turn["ids"])))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            file.close()
            raise WeirError(f"{path} is not a conversation ({error}). Remove it.") from None
        found._file = file
        return found

    def add(self, turn: Turn) -> None:
        """Add a turn, and write it."""
        self._add(turn)
        said = {"user": turn.by_user, "at": turn.start, "text": turn.text, "ids": turn.ids.tolist()}
        self._append(said)

    def whole_turns(self) -> Iterator[Turn]:
        """Yield all turns with all of their text, which is read from the file. Without a file, they
        have only the first `SHOWN` characters.
        """
        if self.path is None:
            yield from self.turns
            return
        known = {turn.start: turn for turn in self.turns}
        with open(self.path, "rb") as file:
            next(file)
            for line in (*file, *self._unwritten.splitlines()):
                said = json.loads(line)
                if (turn := known.get(said["at"])) is not None and turn.by_user == said["user"]:
                    yield replace(turn, text=said["text"])

    @property
    def end(self) -> int:
        """The place in the stream after the last token."""
        return self.turns[-1].end if self.turns else 0

    def after(self, seen: int) -> Iterator[Turn]:
        """Return the turns after the first `seen` tokens of the stream. If these tokens end within
        a turn, the first turn that is returned has the rest of its ids.
        """
        for turn in self.turns:
            if turn.end > seen:
                cut = max(0, seen - turn.start)
                yield Turn(turn.by_user, turn.start + cut, turn.text, turn.ids[cut:])

    def passages(self, holding: Holding) -> list[Passage]:
        """Return all exchanges and the share of each that is held, oldest first. Consecutive ones
        that are held entirely, or not at all, are returned as one passage.
        """
        shares = held_shares(holding)
        found: list[Passage] = []
        for number, group in groupby(self._numbered(), key=lambda pair: pair[0]):
            said = [turn for _, turn in group if turn.ids]
            if not said:
                continue
            tokens = sum(len(turn.ids) for turn in said)
            kept = sum(float(shares[turn.start : turn.end].sum()) for turn in said)
            share = kept / tokens
            before = found[-1] if found else None
            # Turns that are held entirely, or not at all, are grouped. Others are listed
            # separately.
            if before is not None and before.held == share and share in (0.0, 1.0):
                numbers = before.turns[0], number
                found[-1] = Passage(numbers, before.tokens + tokens, share, before.text)
            else:
                found.append(Passage((number, number), tokens, share, said[0].text))
        return found

    def loaded(self, holding: Holding) -> Passage | None:
        """Return the tokens before the first turn, which come from a saved stream, as a passage
        without text. None if there are none.
        """
        tokens = self.turns[0].start if self.turns else 0
        if not tokens:
            return None
        return Passage((0, 0), tokens, float(held_shares(holding)[:tokens].sum()) / tokens, "")

    def _numbered(self) -> Iterator[tuple[int, Turn]]:
        """Return all turns with the numbers of their exchanges; a message begins an exchange."""
        number = 0
        for turn in self.turns:
            number += turn.by_user or not number
            yield number, turn

    def find(
        self, text: str, holding: Holding, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[Found]:
        """Find where a text was said, the newest turn first, ignoring case."""
        shares, wanted = held_shares(holding), text.casefold()
        pools = {it.token: it.pools for it in holding.tokens()}
        for number, turn in reversed(list(self._numbered())):
            words = Detokenizer(tokenizer)
            pieces = [words.add(token).casefold() for token in turn.ids]
            ends = np.cumsum([len(piece) for piece in pieces])
            whole, at = "".join(pieces), -1
            while (at := whole.find(wanted, at + 1)) >= 0:
                first, last = np.searchsorted(ends, [at, at + len(wanted) - 1], side="right")
                place = range(turn.start + int(first), turn.start + int(last) + 1)
                held = tuple(shares[place.start : place.stop].tolist())
                by = dict.fromkeys(name for token in place for name in pools.get(token, ()))
                yield Found(number, turn.by_user, held, tuple(by))

    def close(self) -> None:
        """Close the file. Raises WeirError if turns are missing in it and cannot be written."""
        if self._file is None:
            return
        try:
            self._write()
        finally:
            self._file.close()
            self._file = None

    def _add(self, turn: Turn) -> None:
        while self.turns and self.end > turn.start:
            before = self.turns[-1]
            before.ids = before.ids[: max(0, turn.start - before.start)]
            if not before.ids:
                self.turns.pop()
        self.turns.append(replace(turn, text=turn.text[:SHOWN]))

    def _append(self, facts: dict[str, Any]) -> None:
        if self._file is not None:
            self._unwritten += json.dumps(facts, ensure_ascii=False).encode() + b"\n"
            self._write()

    def _write(self) -> None:
        """Write the lines that are not in the file yet.

        If the disk is full, the file keeps its complete lines, and the others are written with
        the next turn. So the file never lacks a turn between two others.
        """
        assert self._file is not None
        end, rest = self._file.tell(), memoryview(self._unwritten)
        try:
            while rest:  # a full disk can take the first bytes of a line
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            self._file.seek(end)
            raise WeirError(
                f"cannot write the conversation {self.path}: {error.strerror}. Make room on "
                "the disk, or start weir chat with --no-keep."
            ) from None
        self._unwritten = b""


def held_shares(holding: Holding) -> Shares:
    """Return the share of pairs of a layer and KV head that hold each token of a stream [seen]."""
    tokens, shares = find_held(holding)
    dense = np.zeros(holding.seen)
    dense[tokens] = shares
    return dense


def find_held(holding: Holding) -> tuple[np.ndarray[Any, np.dtype[np.int64]], Shares]:
    """Return the tokens that any pair of a layer and KV head holds, in order, and the share of
    pairs that hold each. The time depends on the slots, not on the length of the stream.
    """
    slots, places = number_slots(holding)
    # A token can have several slots in one pair; they count as one.
    tokens, counts = np.unique(np.unique(slots) // places, return_counts=True)
    return tokens, counts / holding.pairs


def number_slots(holding: Holding) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """Number the slots by their token and pair of a layer and KV head: token times a factor, plus
    the pair. Returns the numbers and the factor.
    """
    pair = holding.layer * (int(holding.head.max()) + 1 if len(holding.head) else 1) + holding.head
    places = int(pair.max()) + 1 if len(pair) else 1
    return (holding.token * places + pair).numpy(), places


def repeats(ids: Sequence[int]) -> int:
    """Return the period of a loop at the end of an answer, up to 64 tokens; 0 without a loop.

    A loop must have at least four rounds and at least 24 tokens.
    """
    tail = np.asarray(ids[-4 * 64 :])
    for period in range(1, len(tail) // 4 + 1):
        length = max(4 * period, 24)
        if length <= len(tail) and (tail[-length:-period] == tail[-length + period :]).all():
            return period
    return 0


def _lock(file: IO[bytes]) -> bool:
    """Lock the file until it is closed. Returns whether that succeeded; on systems without locks,
    true.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
