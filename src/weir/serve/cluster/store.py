"""A store that replicas share: turns in files, and of each session a ledger that says which count.

A turn is safe in this order: its snapshot, its record, its page in the ledger; what finds it again
comes after. In memory is what this replica has met of it, the rest is read when somebody asks.
Of each session so many turns are kept. Knows nothing about Ray or HTTP.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from tempfile import TemporaryDirectory

from weir.errors import WeirError
from weir.serve.cluster.index import Index, folder_of
from weir.serve.cluster.leases import Leases
from weir.serve.cluster.ledger import TAKEN, Ledger, Page
from weir.serve.cluster.shared import Shared
from weir.serve.cluster.turnfiles import TurnFiles
from weir.serve.sessions import (
    AnsweredElsewhere,
    BackgroundWriter,
    Checkpoint,
    LeaseLost,
    MemoryStore,
    NameTaken,
    OnSaved,
    RowFormat,
    SessionSummary,
    TurnRecord,
    TurnTokens,
    find_path,
)

KEPT = 8
"""Turns of a session that are kept, the newest ones."""


@dataclass(eq=False)
class SharedLease:
    """A session, for one turn that is to end on this replica.

    Attributes:
        store: the replica's.
        owner, session: which.
        epoch: of the claim that the turn began under.
    """

    store: SharedStore
    owner: str
    session: str
    epoch: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: bool = False

    def release(self) -> None:
        """The turn is over."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self.store.release(self.session)


class SharedStore:
    """A store of one replica, of what all of them have (`weir.serve.Store`).

    Args:
        shared: where all replicas have their files.
        leases: who answers what.
        replica: the name of this one; no other ever had it.
        form: what rows are rows of.
        most: turns that are in memory.
        kept: turns of a session that are kept.

    Raises:
        WeirError: the files are of another model or policy.
    """

    def __init__(
        self,
        shared: Shared,
        leases: Leases,
        replica: str,
        form: RowFormat,
        *,
        most: int = 256,
        kept: int = KEPT,
    ) -> None:
        self.replica = replica
        self._leases = leases
        self._kept = kept
        self._files = TurnFiles(shared, form)
        self._index = Index(shared)
        self._ledger = Ledger(shared)
        self._near = MemoryStore(most)
        self._pages: dict[str, Page] = {}  # this replica's own, by folder
        self._alone = threading.RLock()  # whoever makes pages or changes what is near
        self._answering: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._writer = BackgroundWriter(self._write, 2)

    def close(self) -> None:
        """Write what was put."""
        self._writer.close()

    # --- a turn

    def acquire_lease(self, owner: str, session: str) -> SharedLease:
        """Take hold of a session for a turn, and learn what others have made of it.

        Raises:
            AnsweredElsewhere: another replica is answering it.
            WeirError: it cannot be claimed.
        """
        with self._counting:
            self._answering[session] += 1
        try:
            seconds = self._leases.begin(session, self.replica)
            if seconds > 0:
                raise AnsweredElsewhere(seconds)
            page = self._claim(owner, session)
        except BaseException:
            self.release(session)
            raise
        return SharedLease(self, owner, session, page.epoch)

    def release(self, session: str) -> None:
        """A turn of a session is over."""
        with self._counting:
            self._answering[session] -= 1
            if not self._answering[session]:
                del self._answering[session]
        self._leases.end(session, self.replica)

    def beat(self) -> None:
        """Tell the leases that this replica lives, and what it answers."""
        with self._counting:
            answering = list(self._answering.elements())
        self._leases.beat(self.replica, answering)

    # --- saving

    def load(self, node: str) -> Checkpoint:
        """A checkpoint; one that another replica made is read when its state is needed.

        Raises:
            WeirError: it is not kept.
        """
        return self._near.load(node)

    def save(self, checkpoint: Checkpoint, record: TurnRecord, done: OnSaved) -> None:
        """Save a turn in the writer's thread, which calls `done`.

        The error is `LeaseLost` where another replica has claimed the session since the turn began.
        """
        self._writer.submit(checkpoint, record, done)

    def _write(self, checkpoint: Checkpoint, record: TurnRecord) -> None:
        folder = folder_of(record.owner, record.session)
        snapshot = self._files.snapshot(checkpoint)
        with self._alone, self._undone(folder, [record]):
            self._files.write(folder, record, snapshot)
            page = self._pages.get(folder)
            if page is None or page.epoch != record.epoch:
                raise LeaseLost(TAKEN)
            turns = (*page.turns, record.node)
            self._put(folder, page.next(turns[-self._kept :]))
            gone = turns[: -self._kept]
            self._near.save(checkpoint, record, _ignore)
            self._publish(record.owner, record.session, [record])
            self._remove(record.owner, record.session, gone)

    def drop(self, node: str) -> None:
        """Forget a turn on this replica."""
        self._near.drop(node)

    # --- what a store does

    def find_history(self, owner: str, chain: str) -> TurnRecord | None:
        """The owner's newest turn that ends a conversation of this hash, wherever it was made."""
        found = self._near.find_history(owner, chain)
        if found is None and (session := self._index.chain(owner, chain)) is not None:
            self._learn(owner, session)
            found = self._near.find_history(owner, chain)
        return found

    def find_turn(self, owner: str, node: str) -> TurnRecord | None:
        """A turn of the owner's, wherever it was made."""
        found = self._near.find_turn(owner, node)
        if found is None and (session := self._index.node(owner, node)) is not None:
            self._learn(owner, session)
            found = self._near.find_turn(owner, node)
        return found

    def ancestry(self, owner: str, node: str) -> list[TurnTokens]:
        """The tokens that led to a turn of the owner's, as far back as its turns are kept."""
        self.find_turn(owner, node)
        return self._near.ancestry(owner, node)

    def get_session(self, owner: str, session: str) -> SessionSummary | None:
        """A session of the owner's."""
        self._learn(owner, session)
        return self._near.get_session(owner, session)

    def list_sessions(self, owner: str) -> list[SessionSummary]:
        """All of the owner's, those used longest ago first."""
        return sorted(self._index.sessions(owner), key=lambda session: session.used)

    def list_turns(self, owner: str, session: str) -> list[TurnRecord]:
        """The turns of a session that are kept, in the order they came."""
        self._learn(owner, session)
        return self._near.list_turns(owner, session)

    def fork(self, owner: str, node: str, session: str) -> SessionSummary:
        """Begin a session with copies of a turn and of those it goes on from.

        Raises:
            NameTaken: the owner has a session of this name.
            WeirError: the owner has no such turn, or it cannot be kept.
        """
        record = self.find_turn(owner, node)
        if record is None:
            raise WeirError("there is no such turn")
        whole = {each.node: each for each in self._near.list_turns(owner, record.session)}
        path = find_path(node, {name: each.parent for name, each in whole.items()})
        names = {name: secrets.token_hex(16) for name in path}
        copies = [
            replace(
                whole[name],
                node=names[name],
                session=session,
                parent=names.get(whole[name].parent or ""),
            )
            for name in path
        ]
        return self.import_session(copies, [self.load(name) for name in path])

    def remove_turns(self, owner: str, session: str, nodes: Collection[str]) -> list[str]:
        """Take turns out of a session, also where another replica is answering it just now."""
        folder = folder_of(owner, session)
        with self._alone:
            page = self._claim(owner, session)
            gone = [node for node in page.turns if node in set(nodes)]
            if gone:
                self._put(folder, page.next(n for n in page.turns if n not in set(gone)))
                self._remove(owner, session, gone)
                self._publish(owner, session, [])
        return gone

    def import_session(
        self, records: Sequence[TurnRecord], nodes: Sequence[Checkpoint]
    ) -> SessionSummary:
        """Keep turns of one new session.

        Raises:
            NameTaken: the owner has a session of this name.
            WeirError: they cannot be kept.
        """
        records, nodes = records[-self._kept :], nodes[-self._kept :]
        owner, session = records[0].owner, records[0].session
        folder = folder_of(owner, session)
        with self._alone:
            page = self._claim(owner, session)
            if page.turns:
                raise NameTaken("there is a session of this name already")
            with self._undone(folder, records):
                for record, node in zip(records, nodes, strict=True):
                    self._files.write(folder, record, self._files.snapshot(node))
                self._put(folder, page.next(record.node for record in records))
                self._learn(owner, session)
                self._publish(owner, session, records)
        found = self._near.get_session(owner, session)
        if found is None:
            raise WeirError("the session was taken in, but others took its room at once")
        return found

    def make_scratch_folder(self) -> TemporaryDirectory[str]:
        """A folder for a large file on its way."""
        return self._near.make_scratch_folder()

    # --- pages

    def _claim(self, owner: str, session: str) -> Page:
        """This replica's page of a session, after which no other's turn can end.

        What others were writing when they lost the session is in no page, and goes.
        """
        folder = folder_of(owner, session)
        with self._alone:
            page, newest = self._pages.get(folder), self._ledger.read(folder)
            if page is None or page != newest:
                page = self._pages[folder] = self._ledger.claim(folder, self.replica)
                self._files.keep_only(folder, page.turns)
                self._meet(owner, session, page)
            return page

    def _put(self, folder: str, page: Page) -> None:
        """Make a page of this replica's.

        Raises:
            LeaseLost: another replica has claimed the session.
        """
        try:
            self._ledger.put(folder, page)
        except LeaseLost:
            self._pages.pop(folder, None)
            raise
        self._pages[folder] = page

    def _learn(self, owner: str, session: str) -> None:
        """Know the turns of a session as they are now."""
        folder = folder_of(owner, session)
        with self._alone:
            page = self._ledger.read(folder)
            if page is not None:
                self._meet(owner, session, page)

    def _meet(self, owner: str, session: str, page: Page) -> None:
        """Have the turns of a page near, and no others of its session."""
        near = {record.node for record in self._near.list_turns(owner, session)}
        if near == set(page.turns):
            return
        self._near.remove_turns(owner, session, near)
        folder = folder_of(owner, session)
        for name in page.turns:
            record = self._files.record(folder, name)
            if record is not None:  # it may have gone this moment
                self._near.save(self._files.node(folder, record), record, _ignore)

    @contextmanager
    def _undone(self, folder: str, records: Sequence[TurnRecord]) -> Iterator[None]:
        """What is written while this lasts goes again if it fails, unless a page has it."""
        try:
            yield
        except BaseException:
            page = self._ledger.read(folder)
            for record in records:
                if page is None or record.node not in page.turns:
                    self._files.delete(folder, record.node)
            raise

    def _publish(self, owner: str, session: str, new: Sequence[TurnRecord]) -> None:
        """Let turns be found, and their session."""
        for record in new:
            self._index.add(record)
        self._index.stands(owner, session, self._near.get_session(owner, session))

    def _remove(self, owner: str, session: str, nodes: Collection[str]) -> None:
        """Forget turns that no page has any more."""
        for node in nodes:
            record = self._near.find_turn(owner, node)
            if record is not None:
                self._index.remove(record)
            self._files.delete(folder_of(owner, session), node)
        self._near.remove_turns(owner, session, nodes)


def _ignore(error: Exception | None) -> None:
    """Nothing is done when a turn is in memory."""
