"""How much anybody may ask of a server: every number that a client could drive up has a limit."""

from __future__ import annotations

from dataclasses import dataclass, fields

from weir.errors import WeirError


@dataclass(frozen=True)
class Limits:
    """Limits of a server.

    Attributes:
        body: bytes of a request.
        parcel: bytes of a session's file that is imported or exported.
        prompt: tokens that one request may feed.
        answer: tokens of an answer at most.
        answer_default: tokens of a chat's answer where the client names no number.
        queue: turns that may wait for a row.
        requests: of one key at once, those that wait among them.
        open: requests of all keys at once.
        sessions: of one key; the one used longest ago goes for a new one.
        texts: bytes of a key's responses, and as many of its conversations; the oldest go first.
        wait: seconds that a turn waits for a row.
        stall: seconds that a client may leave what is sent to it unread, or the rest of its request
            unsent.
        unread: tokens of an answer that may wait for the client.
        drain: seconds that answers under way have when the server is to end.
    """

    body: int = 16_000_000
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
    unread: int = 1024
    drain: float = 30.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not 0 < value < 2**53:
                raise WeirError(f"the limit {each.name} must be over 0, not {value!r}")
