"""Checkpoints in memory, and checkpoints read on demand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weir.cache import RowState
from weir.errors import WeirError
from weir.serve.engine import Checkpoint, OnSaved


@dataclass(frozen=True)
class LazyCheckpoint(Checkpoint):
    """A node whose state is read when it is asked for: a row that stands there needs it not.

    Asking for its state raises a WeirError where it cannot be read.
    """

    def __init__(self, pending: tuple[int, ...], read: Callable[[], Checkpoint]) -> None:
        object.__setattr__(self, "pending", pending)
        object.__setattr__(self, "_read", read)

    @property  # type: ignore[misc]  # mypy knows of no attribute that is read later
    def state(self) -> RowState:
        """The row, read anew each time."""
        read: Callable[[], Checkpoint] = getattr(self, "_read")  # noqa: B009
        return read().state


class MemoryCheckpoints:
    """Nodes in memory, at most so many; those that were used longest ago go first.

    Args:
        most: nodes that are kept.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._nodes: dict[str, Checkpoint] = {}

    def get(self, name: str) -> Checkpoint:
        """A node.

        Raises:
            WeirError: there is none of that name.
        """
        node = self._nodes.pop(name, None)
        if node is None:
            raise WeirError("what this turn goes on from is not kept any more")
        self._nodes[name] = node
        return node

    def put(self, name: str, node: Checkpoint, done: OnSaved) -> None:
        """Keep a node."""
        self._nodes.pop(name, None)
        self._nodes[name] = node
        while len(self._nodes) > self._most:
            del self._nodes[next(iter(self._nodes))]
        done(None)

    def drop(self, name: str) -> None:
        """Forget a node."""
        self._nodes.pop(name, None)
