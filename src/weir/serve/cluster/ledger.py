"""The turns of a session, agreed between replicas: numbered pages, each made by one of them.

A page lists the turns; the page with the highest number is valid. Before a replica answers, it
makes a page of its own, which claims the next epoch. It ends the turn by making the page after its
own. That fails once another replica has claimed the session, since that page exists already. So
neither a clock nor a lease decides which replica may end a turn, and a replica that wakes up late
cannot do harm. Knows nothing about what a turn is.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

from weir.errors import WeirError
from weir.serve.cluster.storage import Storage
from weir.serve.sessions import LeaseLost

PAGES = 8
"""Pages of a session that are kept: one would do, but a storage may list pages just deleted."""

TAKEN = "another replica has this session now, so that the turn is not kept; ask again"


@dataclass(frozen=True)
class LedgerPage:
    """The state of a session at one moment.

    Attributes:
        epoch: number of claims of the session so far.
        turns: names of the kept turns, oldest first.
        after: `word` of the previous page; empty on the first.
    """

    number: int
    epoch: int
    replica: str
    turns: tuple[str, ...] = ()
    after: str = ""
    word: str = field(default_factory=lambda: secrets.token_hex(8))

    def next(self, turns: Iterable[str]) -> LedgerPage:
        """The page after this one, by the same replica."""
        return LedgerPage(self.number + 1, self.epoch, self.replica, tuple(turns), self.word)


class Ledger:
    """The pages of all sessions.

    A deleted session keeps one page without turns: if its name is used again its numbers continue,
    so that a replica that comes late finds no number free.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def read(self, folder: str) -> LedgerPage | None:
        """Read the valid page; None if there never was one."""
        for _ in range(100):
            numbers = self._numbers(folder)
            if not numbers:
                return None
            data = self._storage.read(_path(folder, numbers[-1]))
            if data is not None:
                return _page(data, numbers[-1])
        raise WeirError(f"the pages of {folder} go faster than they can be read")

    def claim(self, folder: str, replica: str) -> LedgerPage:
        """Take over a session, so that turns under way on other replicas cannot end any more."""
        for _ in range(100):
            before = self.read(folder)
            mine = LedgerPage(1, 1, replica)
            if before is not None:
                mine = replace(before.next(before.turns), epoch=before.epoch + 1, replica=replica)
            try:
                self._make(folder, mine)
            except LeaseLost:
                continue
            self._delete_old(folder, mine)  # replicas may claim in turns and end nothing
            return mine
        raise WeirError("other replicas claim this session again and again")

    def put(self, folder: str, page: LedgerPage) -> None:
        """Create the page after this replica's own.

        Raises:
            LeaseLost: another replica has claimed the session; nothing has changed.
        """
        self._make(folder, page)
        self._delete_old(folder, page)

    def _delete_old(self, folder: str, page: LedgerPage) -> None:
        for number in self._numbers(folder):
            if number <= page.number - PAGES:
                self._storage.delete(_path(folder, number))

    def _make(self, folder: str, page: LedgerPage) -> None:
        facts = asdict(page)
        del facts["number"]
        path = _path(folder, page.number)
        if not self._storage.create(path, json.dumps(facts).encode()):
            raise LeaseLost(TAKEN)
        if self._numbers(folder)[-1:] == [page.number]:
            return
        # Another replica continued from this page, or the number is an old one, deleted before.
        after = self._storage.read(_path(folder, page.number + 1))
        if after is None or _page(after, page.number + 1).after != page.word:
            self._storage.delete(path)
            raise LeaseLost(TAKEN)

    def _numbers(self, folder: str) -> list[int]:
        """The numbers of all pages, the lowest first."""
        names = self._storage.list_names(f"{folder}/pages")
        return sorted(int(name.removesuffix(".json")) for name in names)


def _path(folder: str, number: int) -> str:
    return f"{folder}/pages/{number:016}.json"


def _page(data: bytes, number: int) -> LedgerPage:
    try:
        facts = json.loads(data)
        return LedgerPage(number, **{**facts, "turns": tuple(facts["turns"])})
    except (ValueError, LookupError, TypeError) as error:
        raise WeirError(f"page {number} of a session is damaged: {error}") from None
