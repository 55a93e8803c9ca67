"""The end of a turn, and the protocol of stores that keep it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from weir.cache import RowState

OnSaved = Callable[[Exception | None], None]


@dataclass(frozen=True)
class Checkpoint:
    """The end of a turn: all that is needed to go on from there.

    Attributes:
        state: of the row.
        pending: tokens of the turn that the row has not read yet: the last of its answer.
    """

    state: RowState
    pending: tuple[int, ...]


class CheckpointStore(Protocol):
    """Keeps nodes by name. Called in the engine's thread; `put` may go on in another.

    What `get` gives is what `put` was given, number for number: nobody checks it again.
    """

    def get(self, name: str) -> Checkpoint:
        """A node.

        Raises:
            WeirError: there is none of that name, or it cannot be read.
        """

    def put(self, name: str, node: Checkpoint, done: OnSaved) -> None:
        """Keep a node, and tell when it is safe, or why it cannot be; from then on `get` has it."""

    def drop(self, name: str) -> None:
        """Forget a node, if there is one of that name."""
