"""Limits of a server, one for every number that a client could increase."""

from __future__ import annotations

from dataclasses import dataclass, fields

from weir.errors import WeirError

MEMORY_OF_BYTE = 24
"""Bytes of memory for a byte of a body.

In the worst case, each byte of the body becomes a token that waits for a row.
"""
NODE = 64
"""Bytes of a body that an object, list or field counts for, besides its text.

This is for its memory, and for the time of the garbage collector.
"""


def share_of(whole: int) -> int:
    """Return how much of a whole one client may take: all but a tenth, and at least 1."""
    return max(1, whole - max(1, whole // 10))


@dataclass(frozen=True)
class Limits:
    """Limits of a server. A client is a key or, without keys, an address.

    Attributes:
        body: bytes of the body of a request.
        bodies: bytes of the bodies of all requests in progress, plus `NODE` for each object, list
            and field. One client may take a share of them (`share_of`).
        reading: bodies of one client that are read at once. If another one arrives, the server
            stops reading one that arrives slowly, if there is one.
        parcel: bytes of a session's file that is imported or exported.
        prompt: tokens that one request may feed.
        answer: tokens of an answer.
        answer_default: tokens of a chat's answer if the client does not say; at most `answer`.
        queue: sequences that may wait for a row.
        requests: requests of one client at once, including waiting ones.
        open: requests of all clients at once.
        sessions: sessions of one key. A new one replaces the least recently used.
        texts: bytes of a key's responses, and the same for its conversations. The oldest are
            deleted first.
        wait: seconds that a sequence waits for a row.
        stall: seconds that a client may leave data unread, or the rest of its body unsent.
        ping: seconds after which a silent stream gets something that clients ignore.
        report: the same, for a client that asks for the progress of its prompt.
        unread: tokens of an answer that may wait for the client.
        drain: seconds that running answers get to finish when the server shuts down.
    """

    body: int = 16_000_000
    bodies: int = 32_000_000
    reading: int = 16
    parcel: int = 1_000_000_000
    prompt: int = 1_000_000
    answer: int = 65_536
    answer_default: int = 4096
    queue: int = 64
    requests: int = 32
    open: int = 256
    sessions: int = 1000
    texts: int = 64_000_000
    wait: float = 60.0
    stall: float = 30.0
    ping: float = 5.0
    report: float = 1.0
    unread: int = 1024
    drain: float = 30.0

    @property
    def memory(self) -> int:
        """Bytes that all requests in progress may take: their bodies, texts and tokens."""
        return MEMORY_OF_BYTE * self.bodies

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not 0 < value < 2**53:
                raise WeirError(
                    f"the limit {field.name} must be a number greater than 0 and less than 2**53, "
                    f"got {value!r}"
                )
