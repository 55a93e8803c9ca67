"""Limits for JSON from clients, whose nodes are counted before anything is parsed."""

from __future__ import annotations

import numpy as np

from weir.errors import WeirError

MAX_NODES = 100_000
"""The most objects, lists and fields in JSON. They take much more memory and time than text."""
PIECE = 65_536
"""Characters of a text that are counted at a time, because no other thread runs meanwhile."""

_NO_MARKS = bytes(set(range(256)) - set(b'"{[:,'))


class TooManyNodes(WeirError):
    """JSON has too many nodes."""

    def __init__(self, most: int) -> None:
        super().__init__(
            f"the JSON can have at most {MAX_NODES:,} objects, lists and fields, and at most "
            f"{most:,} fields and list entries together. Send less"
        )


class NodeCounter:
    """Counts the objects, lists and fields of JSON while it arrives, before anything is parsed.

    Args:
        numbers: list entries that are allowed in addition, for prompts of token ids.

    Attributes:
        nodes: objects, lists and fields so far.
        commas: commas between entries.
    """

    def __init__(self, numbers: int) -> None:
        self._most = MAX_NODES + numbers
        self.nodes = self.commas = 0
        self._in_string = False
        self._backslash = b""

    def feed_text(self, text: str) -> None:
        """Count the nodes of JSON inside a text, as `feed` does. The text begins outside of a
        string.
        """
        self._in_string, self._backslash = False, b""
        for at in range(0, len(text), PIECE):
            self.feed(text[at : at + PIECE].encode("utf-8", "replace"))

    def feed(self, chunk: bytes) -> None:
        """Count the nodes outside of strings in the next part. Raises TooManyNodes above the
        limit.
        """
        chunk = self._backslash + chunk
        self._backslash = b"\\" * ((len(chunk) - len(chunk.rstrip(b"\\"))) % 2)
        chunk = chunk[: len(chunk) - len(self._backslash)]
        marks = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
        if quotes := marks.count(b'"'):
            found = np.frombuffer(marks, np.uint8)
            inside = np.logical_xor.accumulate(found == ord('"')) ^ self._in_string
            outside = found[~inside].tobytes()
            self._in_string ^= quotes % 2 == 1
        else:
            outside = b"" if self._in_string else marks
        self.nodes += sum(map(outside.count, (b"{", b"[", b":")))
        self.commas += outside.count(b",")
        if self.nodes > MAX_NODES or self.commas > self._most:
            raise TooManyNodes(self._most)
