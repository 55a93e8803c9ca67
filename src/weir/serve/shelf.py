"""Where the ends of turns are kept: a protocol, and memory as its simplest form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weir.errors import WeirError
from weir.serve.turn import Node

Done = Callable[[Exception | None], None]


class Shelf(Protocol):
    """Keeps nodes by name. Called in the engine's thread; `put` may go on in another.

    What `get` gives is what `put` was given, number for number: nobody checks it again.
    """

    def get(self, name: str) -> Node:
        """A node.

        Raises:
            WeirError: there is none of that name, or it cannot be read.
        """

    def put(self, name: str, node: Node, done: Done) -> None:
        """Keep a node, and tell when it is safe, or why it cannot be; from then on `get` has it."""

    def drop(self, name: str) -> None:
        """Forget a node, if there is one of that name."""


class MemoryShelf:
    """Nodes in memory, at most so many; those that were used longest ago go first.

    Args:
        most: nodes that are kept.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._nodes: dict[str, Node] = {}

    def get(self, name: str) -> Node:
        """A node.

        Raises:
            WeirError: there is none of that name.
        """
        node = self._nodes.pop(name, None)
        if node is None:
            raise WeirError("what this turn goes on from is not kept any more")
        self._nodes[name] = node
        return node

    def put(self, name: str, node: Node, done: Done) -> None:
        """Keep a node."""
        self._nodes.pop(name, None)
        self._nodes[name] = node
        while len(self._nodes) > self._most:
            del self._nodes[next(iter(self._nodes))]
        done(None)

    def drop(self, name: str) -> None:
        """Forget a node."""
        self._nodes.pop(name, None)
