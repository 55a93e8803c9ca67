"""States of rows after the first tokens of a prompt, so that those tokens are not read twice.

Two kinds are kept. One is the state after the beginning of a conversation (system message and
tools), which other conversations of the same owner share. The other is the state at which a prompt
was interrupted because its client disconnected.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weir.cache import RowState


@dataclass(frozen=True)
class PrefixKey:
    """The facts, apart from tokens, that a state and a prompt must share before the prompt can
    continue from the state.

    Attributes:
        owner: the owner of the conversation; owners do not share states.
        parent: the saved checkpoint after which the tokens come; None if they begin a stream.
        beginning: number of tokens in the stream's beginning (`Marks.beginning`). Rows fold
            differently if it differs. 0 if there is a parent, because the parent's row has the
            number.
        seed: the seed of the row's random draws; 0 if there is a parent, for the same reason.
        kept: ranges of places whose tokens the row must keep, such as results of tools. For a state
            that has read none of these tokens, empty.
    """

    owner: str
    parent: str | None
    beginning: int
    seed: int
    kept: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, eq=False)
class PrefixState:
    """The state of a row that has read some tokens of a prompt."""

    key: PrefixKey
    ids: array[int]
    state: RowState

    @property
    def is_beginning(self) -> bool:
        """Whether the state is at the end of a beginning, which other conversations share."""
        return self.key.parent is None and len(self.ids) == self.key.beginning


class PrefixPlace(Protocol):
    """Keeps states for when the server is started again. Only `read_all` waits for a disk."""

    def read_all(self) -> list[PrefixState]:
        """Return the kept states, the most recently used one last."""

    def add(self, state: PrefixState) -> None:
        """Keep a state."""

    def use(self, state: PrefixState) -> None:
        """Note that a state is being used."""

    def remove(self, state: PrefixState) -> None:
        """Stop keeping a state."""


class PrefixStates:
    """Keeps at most `most` states in memory.

    If there are more, the owner with the most states loses the least recently used one, so that no
    owner can drop all states of another. Only the engine's thread calls this.

    Args:
        place: also keeps beginnings, so that they are available after a restart.
    """

    def __init__(self, most: int, place: PrefixPlace | None = None) -> None:
        self._most = most
        self._place = place
        self._kept: list[PrefixState] = []  # the most recently used one last
        if place is not None:
            found = place.read_all()
            self._kept = found[max(0, len(found) - most) :]
            for state in found[: max(0, len(found) - most)]:
                place.remove(state)

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: PrefixKey, ids: Iterable[int], most: int) -> PrefixState | None:
        """Return the state that has read the most tokens of a prompt, and at most `most`.

        None if there is no such state.
        """
        fitting = [kept for kept in self._kept if kept.key == key and len(kept.ids) <= most]
        if not fitting:
            return None
        prompt = array("I", ids)
        fitting = [kept for kept in fitting if prompt[: len(kept.ids)] == kept.ids]
        found = max(fitting, key=lambda kept: len(kept.ids), default=None)
        if found is not None:
            self._kept.remove(found)
            self._kept.append(found)
            if self._place is not None and found.is_beginning:
                self._place.use(found)
        return found

    def add(self, new: PrefixState) -> None:
        """Keep a state, and drop states that have read the same tokens or a first part of them.

        A state at the end of a beginning is not replaced by a longer one, because other
        conversations with the same beginning start from it.
        """
        if not self._most:
            return
        self._drop([kept for kept in self._kept if _replaces(new, kept)])
        self._kept.append(new)
        if self._place is not None and new.is_beginning:
            self._place.add(new)
        if len(self._kept) > self._most:
            owners = [kept.key.owner for kept in self._kept]
            many = max(map(owners.count, owners))
            gone = next(kept for kept in self._kept if owners.count(kept.key.owner) == many)
            self._drop([gone])

    def forget(self, parent: str) -> None:
        """Drop the states that follow a deleted checkpoint."""
        self._drop([kept for kept in self._kept if kept.key.parent == parent])

    def _drop(self, gone: Sequence[PrefixState]) -> None:
        for state in gone:
            self._kept.remove(state)
            if self._place is not None and state.is_beginning:
                self._place.remove(state)


def _replaces(new: PrefixState, kept: PrefixState) -> bool:
    """Return whether a state makes another one superfluous."""
    if new.key != kept.key or new.ids[: len(kept.ids)] != kept.ids:
        return False
    return len(new.ids) == len(kept.ids) or not kept.is_beginning
