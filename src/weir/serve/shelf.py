"""Checkpoints in memory."""

from __future__ import annotations

from weir.errors import WeirError
from weir.serve.engine import Done, Node


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
