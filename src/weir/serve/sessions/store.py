"""The store of sessions: turns of all owners, in memory or in another place.

A turn is saved completely, state and record, or not at all. If it must be saved, the client is told
only afterwards that the turn has ended. When there is no more room, the least recently used turns
are deleted. A session exists as long as it has a turn.

A turn may be in several sessions, because a fork shares its turns with the other session (but in
storage that replicas share, a fork has copies). A turn is deleted when it is no longer in any
session. The session in its record is the first one that it joined and is still in. Another owner's
turns look absent.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Self

from weir.errors import WeirError, in_words
from weir.serve.messages import Message, ResultPlace
from weir.serve.sessions.records import (
    NOT_KEPT,
    Checkpoint,
    OnSaved,
    SessionSummary,
    StorageFull,
    Turn,
    TurnRecord,
    TurnTokens,
    describe_full,
)
from weir.serve.sessions.turn_archive import TurnArchive
from weir.serve.sessions.turn_tables import DROPPED, PINNED, TurnTables
from weir.stream.archive import Excerpt

_log = logging.getLogger(__name__)
DEFAULT_KEPT = 256
"""Number of turns that are kept in memory by default, if that many fit."""


class SessionStore:
    """The sessions in one place. A separate thread writes to the place if it is not memory.

    Can be called from any thread. `load` returns exactly the numbers that `save` received. Methods
    that write raise a WeirError if the disk cannot be written.

    Args:
        place: where turns are saved; None for memory.
        keep: number of turns. In memory, this many are saved (None: `DEFAULT_KEPT`). In another
            place, this many of the most recently used turns are not deleted when the disk is full,
            and up to this many turns that do not fit on the disk stay in memory until there is room
            (None: 0).
        queue: largest number of turns that are accepted, but not completely written yet. While
            there are this many, `save` waits.
    """

    def __init__(
        self, place: TurnTables | None = None, *, keep: int | None = None, queue: int = 2
    ) -> None:
        self._keep = keep if keep is not None else DEFAULT_KEPT if place is None else 0
        self._memory = TurnTables(self._keep)
        self.place = place or self._memory
        # The newest turns are in the last place.
        self._places = [self._memory] if place is None else [place, self._memory]
        # The thread writes turns in the order in which they arrive.
        self._writer = None if place is None else ThreadPoolExecutor(1, "weir-store")
        self._room_to_wait = threading.BoundedSemaphore(queue)
        self._lock = threading.RLock()
        self._was_full = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Write all pending turns, and release the place."""
        if self._writer is not None:
            self._writer.shutdown()  # waits until the accepted turns are written
            with contextlib.suppress(WeirError):
                self._write_remembered()
        self.place.close()

    @property
    def archive(self) -> TurnArchive | None:
        """The text of the turns in the place. None if it is not kept."""
        return self.place.archive

    # --- saving

    def load(self, node: str) -> Checkpoint:
        """Return the checkpoint of a turn. A state on disk is read when it is needed.

        Raises WeirError if the turn is not kept.
        """
        for place in reversed(self._places):
            if (found := place.load(node)) is not None:
                return found
        raise WeirError(NOT_KEPT)

    def check_room(self, size: int) -> None:
        """Raise StorageFull, before answering, if turns of this many bytes could neither be saved
        nor stay in memory.

        May delete old turns.
        """
        full = not self.place.make_room(size, self._keep)
        if full and not self._was_full:
            _log.warning("%s", self.describe_full(size))
        self._was_full = full
        if full and not self._keep:
            raise StorageFull(self.describe_full(size))

    def is_full(self) -> bool:
        """Return whether the disk has no room for one more turn of a full row."""
        return not self.place.has_room(self.place.turn_bytes())

    def describe_full(self, size: int | None = None) -> str:
        """Describe the effect of a full disk on turns of this many bytes that must be saved.

        None means a turn of a full row.
        """
        more = f". Up to {in_words(self._keep, 'turn')} continue in memory" if self._keep else ""
        needed = self.place.turn_bytes() if size is None else size
        return describe_full(needed, self.place.free_bytes()) + more

    def save(
        self, checkpoint: Checkpoint, record: TurnRecord, done: OnSaved = lambda error: None
    ) -> None:
        """Save a turn as the newest of its session, and call `done`, perhaps in another thread.

        Waits while `queue` earlier turns are not completely written, so that no engine runs ahead
        of the disk.
        """
        if self._writer is None:
            self._memory.add([(checkpoint, record)])
            done(None)
            return
        self._room_to_wait.acquire()
        try:
            self._writer.submit(self._write_and_tell, (checkpoint, record), done)
        except RuntimeError:
            self._room_to_wait.release()
            done(WeirError("the store is closed and saves nothing more"))

    def _write_and_tell(self, turn: Turn, done: OnSaved) -> None:
        error: Exception | None = None
        try:
            self._write(turn)
        except Exception as caught:
            error = caught
        finally:
            self._room_to_wait.release()
        try:
            done(error)
        except Exception:
            _log.exception("the callback of a saved turn has failed")

    def _write(self, turn: Turn) -> None:
        """Write a turn. While the disk is full, the turn stays in memory, unless `keep` is 0."""
        try:
            try:
                self._write_remembered(turn)
            except StorageFull:
                if not self.place.make_room(self.place.turn_bytes(turn[1].seen), self._keep):
                    raise
                self._write_remembered(turn)
        except StorageFull:
            if not self._keep:
                raise
            self._memory.add([turn])

    def _write_remembered(self, *more: Turn) -> None:
        """Write the turns that stayed in memory, the oldest first, and then the turns `more`."""
        with self._lock:
            for record in self._memory.list_all():
                self.place.add([(self.load(record.node), record)])
                self._memory.remove([record.node])
            for turn in more:
                self.place.add([turn])

    def import_session(self, turns: Sequence[Turn]) -> SessionSummary:
        """Save the turns of a new session, either all or none. Parents must come first."""
        for chain in {place.chain for _, record in turns for place in record.kept}:
            self.pin_result(turns[0][1].owner, chain)
        self.place.add(turns, "the session")
        found = self.get_session(turns[0][1].owner, turns[0][1].session)
        if found is None:
            raise WeirError(
                "the session was imported, but its turns were deleted at once to make room. "
                "Import it again, or use a larger --disk."
            )
        return found

    def drop(self, node: str) -> None:
        """Delete a turn, if there is one with that name."""
        with self._lock:
            for place in self._places:
                place.remove([node])

    # --- finding

    def find_history(self, owner: str, chain: str) -> TurnRecord | None:
        """Return the owner's newest turn at the end of a history with this hash."""
        return self.find_turn(owner, chain, "chain")

    def find_turn(self, owner: str, value: str, column: str = "node") -> TurnRecord | None:
        """Return the owner's newest turn with a value in a column of its record."""
        found = (place.newest(owner, column, value) for place in reversed(self._places))
        return next((record for record in found if record is not None), None)

    def ancestry(self, owner: str, node: str) -> list[TurnTokens]:
        """Return the tokens of a turn of the owner and of its ancestors, the oldest first.

        They begin at the start of the stream. If some of these turns are not kept, or their tokens
        are unknown, they begin after the last such turn.
        """
        found: list[TurnTokens] = []
        parent: str | None = node
        for place in reversed(self._places):
            if parent is not None:
                before, further = place.ancestry(owner, parent)
                if not found or (before and before[-1].end == found[0].start < found[0].end):
                    found, parent = before + found, further
        return found

    def _lines(self, owner: str, node: str) -> Iterator[tuple[TurnTables, str]]:
        """Yield the places that can have a turn and its ancestors, the newest first, each with the
        turn at which to begin there. The turn itself can be in memory and its parent on disk.

        If the writer moves a turn out of memory meanwhile, the turn can be found in both places.
        """
        at: str | None = node
        for place in reversed(self._places):
            if at is None:
                return
            yield place, at
            if place is not self.place:
                at = place.find_parent(owner, at)

    def list_results(
        self, owner: str, node: str, call: str | None = None, most: int = 256
    ) -> list[tuple[str, ResultPlace]]:
        """Return the newest results of tools that a turn and its ancestors have read.

        Args:
            owner: the owner of the turn.
            node: the id of the turn.
            call: the id of the call whose results are returned; None for all calls.
            most: largest number of results.

        Returns:
            For each result, the id of its call, and its place in the stream.
        """
        found = [
            each
            for place, at in self._lines(owner, node)
            for each in place.list_results(owner, at, call, most)
        ]
        return list(dict.fromkeys(found))[:most]

    def drop_result(self, owner: str, chain: str) -> None:
        """Note that the result at the end of a history with this hash must not be read again.

        Raises a WeirError if the owner has dropped too many.
        """
        self.place.mark_result(DROPPED, owner, chain)

    def dropped_chains(self, owner: str) -> frozenset[str]:
        """Return the hashes of the owner's histories that end with a dropped result."""
        return self.place.marked_chains(DROPPED, owner)

    def pin_result(self, owner: str, chain: str) -> None:
        """Note that the result at the end of a history with this hash must be kept.

        Raises a WeirError if the owner has pinned too many.
        """
        self.place.mark_result(PINNED, owner, chain)

    def unpin_result(self, owner: str, chain: str) -> None:
        """Note that a result does not have to be kept any longer."""
        self.place.unpin_result(owner, chain)

    def pinned_chains(self, owner: str) -> frozenset[str]:
        """Return the hashes of the owner's histories that end with a pinned result."""
        return self.place.marked_chains(PINNED, owner)

    def read_result(self, owner: str, node: str, chain: str) -> Message | None:
        """Return the message of a result that a turn or one of its ancestors has read; None if it
        is not kept.
        """
        found = (place.read_result(owner, at, chain) for place, at in self._lines(owner, node))
        return next((message for message in found if message is not None), None)

    def dropped_places(self, owner: str, node: str) -> list[tuple[int, int]]:
        """Return the places of the dropped results that a turn and its ancestors have read."""
        if not (dropped := self.dropped_chains(owner)):
            return []
        found = [
            (one.start, one.stop)
            for place, at in self._lines(owner, node)
            for one in place.read_places(owner, at)
            if one.chain in dropped
        ]
        return list(dict.fromkeys(found))

    def search_archive(self, owner: str, node: str, text: str) -> list[Excerpt]:
        """Find answers to the questions in `text` in the archived text of a turn and its ancestors.

        Only text that has left the cache is found, and no dropped outputs of tools. Empty without
        an archive.
        """
        if self.archive is None:
            return []
        dropped = self.dropped_places(owner, node)
        return self.archive.search(owner, self._archived_turn(owner, node), text, dropped)

    def count_archived(self, owner: str, node: str) -> int:
        """Return how many archived turns a search from this turn would read. 0 without an
        archive.
        """
        if self.archive is None:
            return 0
        return self.archive.count_turns(owner, self._archived_turn(owner, node))

    def _archived_turn(self, owner: str, node: str) -> str:
        """Return the turn from which the archive is searched. It has no turns that are in memory,
        so for these it is their parent.
        """
        *_, (_, archived) = self._lines(owner, node)
        return archived

    def get_session(self, owner: str, session: str) -> SessionSummary | None:
        """Return a session of the owner."""
        return next(iter(self.list_sessions(owner, session)), None)

    def list_sessions(self, owner: str, session: str | None = None) -> list[SessionSummary]:
        """Return all sessions of the owner, or one of them, the least recently used first."""
        found: dict[str, SessionSummary] = {}
        for place in self._places:
            for new in place.summaries(owner, session):
                # A session that also has turns in memory is the most recently used.
                old = found.pop(new.id, None)
                if old is not None:
                    topic, turns = new.topic or old.topic, old.turns + new.turns
                    new = replace(new, turns=turns, created=old.created, topic=topic)
                found[new.id] = new
        return list(found.values())

    def list_turns(self, owner: str, session: str) -> list[TurnRecord]:
        """Return the kept turns of a session in order. Empty if there is no such session."""
        return [record for place in self._places for record in place.list_turns(owner, session)]

    # --- sessions that exist

    def fork(self, owner: str, node: str, session: str) -> SessionSummary:
        """Begin a session that has an existing turn and its ancestors.

        Raises NameTaken if the owner has a session with this name, and WeirError if there is no
        such turn.
        """
        if self._writer is not None:
            self._write_remembered()
        self.place.fork(owner, node, session)
        found = self.get_session(owner, session)
        if found is None:
            raise WeirError("the turn does not exist")  # it was deleted this moment
        return found

    def remove_turns(self, owner: str, session: str, nodes: Collection[str]) -> list[str]:
        """Remove turns from a session. Returns those that were in no other session and are now
        deleted.
        """
        with self._lock:
            return [n for place in self._places for n in place.remove(nodes, owner, session)]

    def make_scratch_folder(self) -> TemporaryDirectory[str]:
        """Make a folder for a file that is being exported or imported, which may be large.

        If the store is in a folder, the new folder is inside, and the next start of the server
        deletes what a crash has left there.
        """
        if self.place.scratch is not None:
            self.place.scratch.mkdir(mode=0o700, exist_ok=True)
        return TemporaryDirectory(prefix="weir-", dir=self.place.scratch)
