"""The tables of an archive, and the functions that write to them.

Turns are on branches. A branch begins with a conversation or at a fork, and a turn is visible from
all branches that fork after it. Branches that fork from each other form a tree. Every row outside
the full-text indexes names its owner, and every query that returns text or turns filters by owner,
so that another owner's text looks absent.

The functions take a SQLite connection instead of a path. A server keeps the archive in a separate
file, which it attaches to the connection of its sessions to write both in one transaction.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from weir.errors import WeirError
from weir.stream.archive.passages import cut_passages
from weir.stream.archive.words import index_form, is_english

ARCHIVE_VERSION = 1
"""Version of the tables (`PRAGMA user_version`)."""
_WORDS = "unicode61 remove_diacritics 2 categories 'L* N* Co M*'"
_INDEX = "tree, words, content = '', columnsize = 0, tokenize = \"{}\""
INDEXES = {True: "archived_english", False: "archived_plain"}
"""The index of English passages, and the index of all others."""
ARCHIVE_TABLES = f"""
CREATE TABLE {{0}}archived_owners (
    owner TEXT PRIMARY KEY,
    bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE {{0}}archived_branches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    tree INTEGER NOT NULL,       -- the number of its first branch
    parent INTEGER,              -- the branch that it forks from, if any,
    fork INTEGER,                -- and the last turn there that it shares
    english INTEGER NOT NULL,    -- in a first branch: number of the tree's passages in this index,
    plain INTEGER NOT NULL       -- and in this one
);
CREATE INDEX {{0}}archived_branches_tree ON archived_branches (tree);
CREATE TABLE {{0}}archived_ends (  -- where a saved turn, or a session, ends
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    tree INTEGER NOT NULL,
    branch INTEGER NOT NULL,
    turn INTEGER NOT NULL,       -- 0 before the first
    held BLOB NOT NULL,          -- what its cache holds; empty if unknown
    PRIMARY KEY (owner, name)
) WITHOUT ROWID;
CREATE INDEX {{0}}archived_ends_tree ON archived_ends (tree, branch);
CREATE TABLE {{0}}archived_turns (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    tree INTEGER NOT NULL,
    branch INTEGER NOT NULL,
    role TEXT NOT NULL,
    name TEXT NOT NULL,          -- of the author or the tool; empty for most
    time REAL NOT NULL,          -- seconds since 1970
    bytes INTEGER NOT NULL
);
CREATE INDEX {{0}}archived_turns_branch ON archived_turns (branch, number);
CREATE INDEX {{0}}archived_turns_owner ON archived_turns (owner, number);
CREATE TABLE {{0}}archived_passages (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    tree INTEGER NOT NULL,
    branch INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    start INTEGER NOT NULL,      -- its first position in the stream,
    stop INTEGER NOT NULL,       -- and the one after its last; both -1 if it is in none
    english INTEGER NOT NULL,    -- which index it is in
    text TEXT NOT NULL
);
CREATE INDEX {{0}}archived_passages_turn ON archived_passages (turn);
CREATE VIRTUAL TABLE {{0}}archived_english USING fts5({_INDEX.format(f"porter {_WORDS}")});
CREATE VIRTUAL TABLE {{0}}archived_plain USING fts5({_INDEX.format(_WORDS)});
"""
"""The tables; `format` inserts the prefix with the name of the database, such as "archive."."""

TEXT_COST = 2.2
"""Bytes that each byte of text is assumed to take in the file, including its share of the indexes.
The measured number is 1.8.
"""
ROW_COST = 220
"""Bytes in the file for each turn, and for each passage, apart from its text."""
DROPPED = 64
"""Largest number of turns that are deleted at once to make room."""

LINE = (
    "WITH RECURSIVE line (branch, turn) AS (VALUES (?1, ?2) UNION ALL "
    "SELECT parent, fork FROM archived_branches JOIN line ON number = branch "
    "WHERE parent IS NOT NULL AND owner = ?3)"
)
"""Begins a query with the branches that are visible from an end, and the last visible turn of each.
The first three values are the branch and turn of the end, and the owner."""

RunQuery = Callable[..., list[sqlite3.Row]]
"""Runs a query with its values, and returns its rows by column name."""


class ArchiveProblem(WeirError):
    """An archive cannot be read or written. The conversation or stream continues without it."""


@dataclass(frozen=True)
class ArchivedTurn:
    """A turn for an archive: one message, or a piece of a stream.

    Attributes:
        role: "user", "assistant", "tool" or "system"; "text" for a piece of a stream.
        text: what was said.
        start, stop: its first position in the stream, and the one after its last; -1 if it is not
            in a stream.
        name: the name of the author or of the tool; empty for most.
        time: when it was said, in seconds since 1970.
    """

    role: str
    text: str
    start: int = -1
    stop: int = -1
    name: str = ""
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class ArchiveEnd:
    """Where a turn or session ends: its tree, branch and last turn, 0 for none, and what its cache
    holds.
    """

    tree: int
    branch: int
    turn: int
    held: bytes = b""


class ArchiveTables:
    """Writes turns to an archive and deletes them, in transactions of the caller.

    Args:
        limit: bytes that all text and its indexes may take; None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit

    def create(self, db: sqlite3.Connection, schema: str = "") -> None:
        """Create the tables in the main database. For an attached database, `schema` is its name
        and a dot, such as "archive.".
        """
        for statement in ARCHIVE_TABLES.format(schema).split(";\n"):
            db.execute(statement)

    def find_end(self, query: RunQuery, owner: str, name: str) -> ArchiveEnd | None:
        """Find where a saved turn or a session ends."""
        rows = query(
            "SELECT tree, branch, turn, held FROM archived_ends WHERE owner = ? AND name = ?",
            owner,
            name,
        )
        return ArchiveEnd(*rows[0]) if rows else None

    def add(
        self,
        db: sqlite3.Connection,
        owner: str,
        name: str,
        after: ArchiveEnd | None,
        turns: Sequence[ArchivedTurn],
        held: bytes = b"",
    ) -> int:
        """Add turns after an end, or as the first of a conversation. Their end is called `name`.
        Turns without text, and turns that are larger than the limit, are left out.

        Returns the number of turns that were deleted to make room.
        """
        end = self._branch_after(db, owner, after)
        number = end.turn
        for turn in turns:
            if turn.text.strip() and (self.limit is None or _cost(turn) <= self.limit):
                number = self._insert(db, owner, end, turn)
        db.execute(
            "INSERT OR REPLACE INTO archived_ends VALUES (?, ?, ?, ?, ?, ?)",
            (owner, name, end.tree, end.branch, number, held),
        )
        return self.make_room(db)

    def _branch_after(
        self, db: sqlite3.Connection, owner: str, after: ArchiveEnd | None
    ) -> ArchiveEnd:
        """Return the end of the branch to which turns are added: a new branch if there is no end
        yet, or if other turns already follow it.
        """
        columns = "INSERT INTO archived_branches (owner, tree, parent, fork, english, plain) VALUES"
        if after is None:
            made = db.execute(f"{columns} (?, 0, NULL, NULL, 0, 0)", (owner,)).lastrowid
            assert made is not None
            db.execute(
                "UPDATE archived_branches SET tree = number WHERE number = ? AND owner = ?",
                (made, owner),
            )
            return ArchiveEnd(made, made, 0)
        later = "SELECT 1 FROM archived_turns WHERE branch = ? AND number > ? AND owner = ? LIMIT 1"
        place = (after.branch, after.turn, owner)
        if db.execute(later, place).fetchone() is None:
            return after
        values = (owner, after.tree, after.branch, after.turn)
        made = db.execute(f"{columns} (?, ?, ?, ?, 0, 0)", values).lastrowid
        assert made is not None
        return ArchiveEnd(after.tree, made, after.turn)

    def _insert(
        self, db: sqlite3.Connection, owner: str, end: ArchiveEnd, turn: ArchivedTurn
    ) -> int:
        """Insert a turn and its passages; return its number."""
        cost = _cost(turn)
        number = db.execute(
            "INSERT INTO archived_turns (owner, tree, branch, role, name, time, bytes) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (owner, end.tree, end.branch, turn.role, turn.name, turn.time, cost),
        ).lastrowid
        assert number is not None
        text = turn.text.encode("utf-8", "replace").decode()
        counts = {True: 0, False: 0}
        length = max(0, turn.stop - turn.start)
        at = 0
        for passage in cut_passages(text):
            english = is_english(passage)
            counts[english] += 1
            start, stop = turn.start, turn.stop
            if length:
                # The place of each character in the stream is unknown, so they are assumed to be
                # evenly spaced.
                start = turn.start + length * at // len(text)
                stop = turn.start + -(-length * (at + len(passage)) // len(text))
            at += len(passage)
            made = db.execute(
                "INSERT INTO archived_passages (owner, tree, branch, turn, start, stop, english, "
                "text) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (owner, end.tree, end.branch, number, start, stop, english, passage),
            ).lastrowid
            db.execute(
                f"INSERT INTO {INDEXES[english]} (rowid, tree, words) VALUES (?, ?, ?)",
                (made, f"t{end.tree}", index_form(passage)),
            )
        db.execute(
            "UPDATE archived_branches SET english = english + ?, plain = plain + ? "
            "WHERE number = ? AND owner = ?",
            (counts[True], counts[False], end.tree, owner),
        )
        db.execute(
            "INSERT INTO archived_owners VALUES (?, ?) "
            "ON CONFLICT (owner) DO UPDATE SET bytes = bytes + excluded.bytes",
            (owner, cost),
        )
        return number

    # --- deleting

    def make_room(self, db: sqlite3.Connection) -> int:
        """Delete the oldest turns of the owner with the most text until the archive is within its
        limit. Returns the number of deleted turns.

        So no owner who has less than an equal share loses text to another owner.
        """
        deleted = 0
        while self.limit is not None:
            rows = db.execute("SELECT owner, bytes FROM archived_owners ORDER BY bytes DESC")
            owners = rows.fetchall()
            excess = sum(row[1] for row in owners) - self.limit
            if excess <= 0:
                break
            oldest: list[int] = []
            for number, cost in db.execute(
                "SELECT number, bytes FROM archived_turns WHERE owner = ? ORDER BY number LIMIT ?",
                (owners[0][0], DROPPED),
            ):
                if excess <= 0:
                    break
                oldest.append(number)
                excess -= cost
            if not oldest:
                break
            self._delete_turns(db, owners[0][0], oldest)
            deleted += len(oldest)
        return deleted

    def fork(self, db: sqlite3.Connection, owner: str, name: str, other: str) -> None:
        """Give another name the same end."""
        db.execute(
            "INSERT OR REPLACE INTO archived_ends SELECT owner, ?, tree, branch, turn, held "
            "FROM archived_ends WHERE owner = ? AND name = ?",
            (other, owner, name),
        )

    def forget(self, db: sqlite3.Connection, owner: str, names: Collection[str]) -> None:
        """Delete ends, and all turns that are not visible from any other end."""
        trees: set[int] = set()
        for name in names:
            for row in db.execute(
                "SELECT tree FROM archived_ends WHERE owner = ? AND name = ?", (owner, name)
            ).fetchall():
                trees.add(row[0])
            db.execute("DELETE FROM archived_ends WHERE owner = ? AND name = ?", (owner, name))
        for tree in trees:
            self._prune(db, owner, tree)

    def _prune(self, db: sqlite3.Connection, owner: str, tree: int) -> None:
        """Delete the turns and branches of a tree that are not visible from any end."""
        ends = "SELECT branch, max(turn) FROM archived_ends WHERE tree = ? AND owner = ? GROUP BY 1"
        needed: dict[int, int] = dict(map(tuple, db.execute(ends, (tree, owner)).fetchall()))
        branches = db.execute(
            "SELECT number, parent, fork FROM archived_branches WHERE tree = ? AND owner = ? "
            "ORDER BY number DESC",
            (tree, owner),
        ).fetchall()
        for number, parent, fork in branches:  # a branch is younger than its parent
            if number in needed and parent is not None:
                needed[parent] = max(needed.get(parent, 0), fork)
        for number, *_ in branches:
            gone = db.execute(
                "SELECT number FROM archived_turns WHERE branch = ? AND number > ? AND owner = ?",
                (number, needed.get(number, 0), owner),
            ).fetchall()
            self._delete_turns(db, owner, [row[0] for row in gone])
            if number not in needed:
                db.execute(
                    "DELETE FROM archived_branches WHERE number = ? AND owner = ?", (number, owner)
                )

    def _delete_turns(self, db: sqlite3.Connection, owner: str, turns: Sequence[int]) -> None:
        """Delete turns and their passages, including their entries in the indexes."""
        for turn in turns:
            passages = db.execute(
                "SELECT number, tree, english, text FROM archived_passages "
                "WHERE turn = ? AND owner = ?",
                (turn, owner),
            ).fetchall()
            for number, tree, english, text in passages:
                index = INDEXES[bool(english)]
                # An index without content must be given the text that is deleted.
                db.execute(
                    f"INSERT INTO {index} ({index}, rowid, tree, words) VALUES ('delete', ?, ?, ?)",
                    (number, f"t{tree}", index_form(text)),
                )
                column = "english" if english else "plain"
                db.execute(
                    f"UPDATE archived_branches SET {column} = {column} - 1 "
                    "WHERE number = ? AND owner = ?",
                    (tree, owner),
                )
            db.execute("DELETE FROM archived_passages WHERE turn = ? AND owner = ?", (turn, owner))
            db.execute(
                "UPDATE archived_owners SET bytes = bytes - (SELECT bytes FROM archived_turns "
                "WHERE number = ? AND owner = ?) WHERE owner = ?",
                (turn, owner, owner),
            )
            db.execute("DELETE FROM archived_turns WHERE number = ? AND owner = ?", (turn, owner))
        db.execute("DELETE FROM archived_owners WHERE bytes <= 0 AND owner = ?", (owner,))

    def rewind(
        self, db: sqlite3.Connection, owner: str, name: str, end: ArchiveEnd, start: int
    ) -> None:
        """Let a session end before its first turn with a passage that begins at position `start` or
        later. This turn can be on a branch from which the session's branch was forked. Delete this
        turn and the session's later turns, except those that are visible from another end.
        """
        found = db.execute(
            f"{LINE} SELECT line.branch, archived_passages.turn FROM line JOIN archived_passages "
            "ON archived_passages.branch = line.branch AND archived_passages.turn <= line.turn "
            "WHERE start >= ?4 AND owner = ?3 ORDER BY archived_passages.turn LIMIT 1",
            (end.branch, end.turn, owner, start),
        ).fetchone()
        if found is not None:
            branch, first = found
            db.execute(
                "UPDATE archived_ends SET branch = ?, turn = ? WHERE owner = ? AND name = ?",
                (branch, first - 1, owner, name),
            )
            self._prune(db, owner, end.tree)

    def unplace(self, db: sqlite3.Connection, owner: str, end: ArchiveEnd, start: int) -> None:
        """Record that passages that begin at position `start` or later, and are visible from an
        end, are no longer in a stream.
        """
        db.execute(
            f"{LINE} UPDATE archived_passages SET start = -1, stop = -1 WHERE start >= ?4 AND "
            "owner = ?3 AND turn <= (SELECT turn FROM line WHERE line.branch = "
            "archived_passages.branch)",
            (end.branch, end.turn, owner, start),
        )


def _cost(turn: ArchivedTurn) -> int:
    """Estimate the bytes that a turn takes in the file."""
    size = len(turn.text.encode("utf-8", "replace"))
    return int(TEXT_COST * size) + ROW_COST * (2 + size // 300)
