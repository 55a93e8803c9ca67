"""What a session's turns are, said once for all replicas: numbered pages, each made by one of them.

A page lists the turns; the one of the highest number holds. Whoever is to answer first makes a page
that is theirs, a claim of the next epoch. A turn ends by making the next page after one's own, so
that it cannot end once another has claimed: that page is there. So no clock and no lease decides
who may end a turn, and however late a replica wakes up, it finds its page made by somebody else.
Knows nothing about what a turn is.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace

from weir.errors import WeirError
from weir.serve.cluster.shared import Shared
from weir.serve.sessions import LeaseLost

PAGES = 8
"""Pages of a session that stay: one would do, but a storage may list what was there just now."""

TAKEN = "another replica has this session now, so that the turn is not kept; ask again"


@dataclass(frozen=True)
class Page:
    """What a session was at one moment.

    Attributes:
        number: of the page.
        epoch: how often the session was claimed.
        replica: by whom, for people.
        turns: the ends of turns that are kept, the oldest first.
        after: the word of the page before; empty at the first.
        word: that no other page has.
    """

    number: int
    epoch: int
    replica: str
    turns: tuple[str, ...] = ()
    after: str = ""
    word: str = field(default_factory=lambda: secrets.token_hex(8))

    def next(self, turns: Iterable[str]) -> Page:
        """The page after this one, by the same replica."""
        return Page(self.number + 1, self.epoch, self.replica, tuple(turns), self.word)


class Ledger:
    """The pages of all sessions.

    A session that was deleted keeps one page without turns: its numbers go on, if its name is used
    again, so that nobody who comes late finds a number free.

    Args:
        shared: where they are.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    def read(self, folder: str) -> Page | None:
        """The page of a session that holds; None where there never was one.

        Raises:
            WeirError: it cannot be read.
        """
        for _ in range(100):
            numbers = self._numbers(folder)
            if not numbers:
                return None
            data = self._shared.read(_path(folder, numbers[-1]))
            if data is not None:
                return _page(data, numbers[-1])
        raise WeirError(f"the pages of {folder} go faster than they can be read")

    def claim(self, folder: str, replica: str) -> Page:
        """Take a session over: turns that others have under way cannot end any more.

        Raises:
            WeirError: others claim it again and again.
        """
        for _ in range(100):
            before = self.read(folder)
            mine = Page(1, 1, replica)
            if before is not None:
                mine = replace(before.next(before.turns), epoch=before.epoch + 1, replica=replica)
            try:
                self._make(folder, mine)
            except LeaseLost:
                continue
            self._delete_old(folder, mine)  # replicas may claim in turns and end nothing
            return mine
        raise WeirError("other replicas claim this session again and again")

    def put(self, folder: str, page: Page) -> None:
        """Make the page after one's own.

        Raises:
            LeaseLost: another replica has claimed the session; nothing has changed.
        """
        self._make(folder, page)
        self._delete_old(folder, page)

    def _delete_old(self, folder: str, page: Page) -> None:
        for number in self._numbers(folder):
            if number <= page.number - PAGES:
                self._shared.delete(_path(folder, number))

    def _make(self, folder: str, page: Page) -> None:
        said = asdict(page)
        del said["number"]
        path = _path(folder, page.number)
        if not self._shared.create(path, json.dumps(said).encode()):
            raise LeaseLost(TAKEN)
        if self._numbers(folder)[-1:] == [page.number]:
            return
        # Somebody has gone on from it, or it had been made before, and was deleted as old.
        after = self._shared.read(_path(folder, page.number + 1))
        if after is None or _page(after, page.number + 1).after != page.word:
            self._shared.delete(path)
            raise LeaseLost(TAKEN)

    def _numbers(self, folder: str) -> list[int]:
        """The numbers of all pages that are there, the lowest first."""
        names = self._shared.names(f"{folder}/pages")
        return sorted(int(name.removesuffix(".json")) for name in names)


def _path(folder: str, number: int) -> str:
    return f"{folder}/pages/{number:016}.json"


def _page(data: bytes, number: int) -> Page:
    try:
        said = json.loads(data)
        return Page(number, **{**said, "turns": tuple(said["turns"])})
    except (ValueError, LookupError, TypeError) as error:
        raise WeirError(f"page {number} of a session is damaged: {error}") from None
