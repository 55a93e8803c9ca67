"""Two replicas, one session: killed, asleep, with clocks that jump; no head has two finishes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from weir.serve.cluster.leases import LeaseTable
from weir.serve.cluster.ledger import PAGES, Ledger, Page
from weir.serve.sessions import LeaseLost

FOLDER = "session"
NAMES = st.sampled_from(["a", "b"])


class Memory:
    """A storage in memory, where something else may happen right before a file is made."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.meanwhile: Callable[[], None] | None = None

    def create(self, path: str, data: bytes) -> bool:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        if path in self.files:
            return False
        self.files[path] = data
        return True

    def read(self, path: str) -> bytes | None:
        return self.files.get(path)

    def names(self, path: str) -> list[str]:
        return sorted(name.rpartition("/")[2] for name in self.files if name.startswith(path))

    def delete(self, path: str) -> None:
        self.files.pop(path, None)


@dataclass
class Turn:
    """A turn under way: who answers, the page it began at."""

    replica: str
    page: Page


class Cluster(RuleBasedStateMachine):
    """Replicas that do what they should, and as late as they like."""

    @initialize()
    def begin_with_nothing(self) -> None:
        self.shared = Memory()
        self.ledger = Ledger(self.shared)
        self.now = 0.0
        self.table = LeaseTable(10.0, clock=lambda: self.now)
        self.pages: dict[str, Page] = {}  # each replica's own
        self.turns: list[Turn] = []
        self.killed: list[Turn] = []  # of replicas that were killed, or only slept
        self.kept: list[str] = []  # turns whose end a client saw
        self.heads: dict[tuple[str, ...], int] = {}  # the epoch in which a head was gone on from

    def claim(self, replica: str) -> Page:
        """What a replica does before each turn."""
        newest = self.ledger.read(FOLDER)
        if newest is None or newest != self.pages.get(replica):
            self.pages[replica] = self.ledger.claim(FOLDER, replica)
        return self.pages[replica]

    def finish(self, turn: Turn) -> None:
        """What it does at its end; a client sees it unless the replica has lost the session."""
        mine = self.pages.get(turn.replica)
        if mine is None or mine.epoch != turn.page.epoch:
            return
        node = f"{len(self.kept)}{turn.replica}"
        page = mine.next([*mine.turns, node][-PAGES:])
        try:
            self.ledger.put(FOLDER, page)
        except LeaseLost:
            self.pages.pop(turn.replica)
            return
        self.pages[turn.replica] = page
        self.kept.append(node)
        assert self.heads.setdefault(turn.page.turns, page.epoch) == page.epoch
        newest = self.ledger.read(FOLDER)
        assert newest is not None
        assert newest.epoch == page.epoch

    @rule(replica=NAMES)
    def a_turn_begins(self, replica: str) -> None:
        if self.table.begin(FOLDER, replica) == 0:
            self.turns.append(Turn(replica, self.claim(replica)))

    @rule(which=st.integers(0, 9))
    def a_turn_ends(self, which: int) -> None:
        if self.turns:
            turn = self.turns.pop(which % len(self.turns))
            self.finish(turn)
            self.table.end(FOLDER, turn.replica)

    @rule(replica=NAMES)
    def a_replica_is_killed_or_sleeps(self, replica: str) -> None:
        self.killed += [turn for turn in self.turns if turn.replica == replica]
        self.turns = [turn for turn in self.turns if turn.replica != replica]

    @rule(which=st.integers(0, 9), pages=st.integers(0, 2 * PAGES))
    def one_that_slept_ends_its_turn_after_all(self, which: int, pages: int) -> None:
        if not self.killed:
            return
        turn = self.killed.pop(which % len(self.killed))
        other = "b" if turn.replica == "a" else "a"

        def meanwhile() -> None:
            if pages:
                self.claim(other)
            for _ in range(pages):
                self.finish(Turn(other, self.pages[other]))

        self.shared.meanwhile = meanwhile
        self.finish(turn)
        self.shared.meanwhile = None

    @rule(replica=NAMES)
    def a_replica_is_heard(self, replica: str) -> None:
        self.table.beat(replica, [FOLDER for turn in self.turns if turn.replica == replica])

    @rule(by=st.sampled_from([-1e6, -5.0, 1.0, 5.0, 11.0, 1e6]))
    def the_clock_goes_or_jumps(self, by: float) -> None:
        self.now += by

    @rule()
    def the_table_is_lost(self) -> None:
        self.table = LeaseTable(10.0, clock=lambda: self.now)

    @invariant()
    def the_page_that_holds_has_what_clients_saw(self) -> None:
        newest = self.ledger.read(FOLDER)
        assert list(newest.turns if newest else ()) == self.kept[-PAGES:]
        assert len(self.shared.files) <= PAGES + 1


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=25, stateful_step_count=20)


def test_a_turn_under_way_keeps_its_session_until_its_replica_is_silent_for_too_long():
    now = 0.0
    table = LeaseTable(10.0, clock=lambda: now)
    assert table.begin("s", "a") == 0
    assert table.begin("s", "b") == 10
    assert table.begin("other", "b") == 0
    now = 9.0
    table.beat("a", ["s"])
    now = 12.0
    assert table.begin("s", "b") == 7
    now = 19.0
    assert table.begin("s", "b") == 0
    assert table.holder("s") == "b"


def test_a_session_that_nobody_answers_goes_to_who_is_asked_next():
    table = LeaseTable(10.0, clock=lambda: 0.0)
    table.begin("s", "a")
    table.begin("s", "a")
    table.end("s", "a")
    assert table.begin("s", "b") == 10
    table.end("s", "a")
    assert table.holder("s") == "a"
    assert table.begin("s", "b") == 0


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_clock_that_jumps_makes_nobody_wait_longer(jump):
    now = 0.0
    table = LeaseTable(10.0, clock=lambda: now)
    table.begin("s", "a")
    now = jump
    assert table.begin("s", "b") <= 10


def test_a_table_that_was_lost_knows_again_what_is_answered():
    table = LeaseTable(10.0, clock=lambda: 0.0)
    table.beat("a", ["s"])
    assert table.begin("s", "b") == 10
    table.beat("a", [])
    assert table.begin("s", "b") == 0
    table.beat("a", ["s"])  # which is b's now
    assert table.holder("s") == "b"


def test_where_sessions_were_is_forgotten_for_those_used_longest_ago():
    table = LeaseTable(10.0, clock=lambda: 0.0, most=2)
    for session in ("old", "busy", "new"):
        table.begin(session, "a")
        if session != "busy":
            table.end(session, "a")
    assert [table.holder(s) for s in ("old", "busy", "new")] == [None, "a", "a"]
