"""SQLite-backed store of OpenAI's responses and conversations, as text.

Text is small compared with a checkpoint and is kept longer. If the checkpoint of a turn was
deleted, the model reads the conversation again from the text stored here. Every query names the
owner, so that another owner's data looks absent.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weir.serve.sessions.database import Database, insert
from weir.serve.sessions.items import Item, new_id
from weir.serve.sessions.records import StorageFull, describe_full
from weir.serve.sessions.snapshot_folder import free_bytes

VERSION = 1
OVERHEAD = 500
"""Approximate number of bytes that a row takes besides its text."""

ROOM = 2**18
"""Bytes that must be free on the disk before the answer to a request is begun."""

_TABLES = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order they came
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    session TEXT NOT NULL,
    previous TEXT,
    instructions TEXT,
    input TEXT NOT NULL,  -- JSON: items
    body TEXT NOT NULL,  -- JSON: as it was sent to the client
    bytes INTEGER NOT NULL
);
CREATE INDEX responses_owner ON responses (owner, number, bytes);
CREATE TABLE conversations (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    number INTEGER NOT NULL,  -- rises with each use, because a clock can be set back
    created INTEGER NOT NULL,
    metadata TEXT NOT NULL,  -- JSON: texts by name
    head TEXT,  -- the id of the newest response in it
    read INTEGER NOT NULL,  -- the number of the last item that this response has read
    whole INTEGER NOT NULL,  -- whether all its items are kept
    bytes INTEGER NOT NULL
);
CREATE INDEX conversations_owner ON conversations (owner, number, bytes);
CREATE TABLE items (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    owner TEXT NOT NULL,
    conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    body TEXT NOT NULL,  -- JSON: as the client sees it
    bytes INTEGER NOT NULL,
    UNIQUE (conversation, id)
);
CREATE INDEX items_owner ON items (owner, number, bytes);
"""


@dataclass(frozen=True)
class StoredResponse:
    """A stored response. Its id is `resp_` and the name of its turn."""

    id: str
    session: str
    previous: str | None
    instructions: str | None
    input: list[Item]
    body: dict[str, Any]

    @property
    def own_tools(self) -> list[str]:
        """Names of the server's tools that the model could call."""
        found: list[str] = self.body.get("weir", {}).get("tools", [])
        return found


@dataclass(frozen=True)
class StoredConversation:
    """A stored conversation.

    Attributes:
        id: the id of the conversation.
        created: when it was created, in seconds since 1970.
        metadata: the client's texts by name.
        head: the id of the newest response, from whose turn the next one continues; None if the
            next response must read all items.
        read: number of the last item that the turn of `head` has read; 0 if there is no head.
        whole: whether all items are still stored.
    """

    id: str
    created: int
    metadata: dict[str, str]
    head: str | None
    read: int
    whole: bool


class ResponseStore:
    """Responses and conversations of all owners, open until `close`.

    Methods that write raise a WeirError if the disk cannot be written.

    Args:
        path: path of the file; None for memory.
        most: maximum bytes of all responses of an owner. The same limit applies to all
            conversations of an owner without their items, and to all items of these conversations.
            Above the limit, the oldest responses or items are deleted, or the conversations that
            were used least recently.
    """

    def __init__(self, path: Path | None = None, most: int = 64_000_000) -> None:
        self._tables = Database(path, _TABLES, VERSION)
        self._path = path
        self._most = most

    def close(self) -> None:
        """Close the file."""
        self._tables.close()

    def check_room(self) -> None:
        """Raise StorageFull, before answering, if a response could not be stored."""
        if self._path is not None and (free := free_bytes(self._path.parent)) < ROOM:
            raise StorageFull(describe_full(ROOM, free))

    # --- responses

    def save_response(
        self,
        owner: str,
        response: StoredResponse,
        conversation: str | None = None,
        items: Sequence[Item] = (),
    ) -> None:
        """Save a response. If it belongs to a conversation, make it the newest one there, and add
        its new items.

        Args:
            owner: the owner of the response.
            response: the response.
            conversation: the id of its conversation; None if it is in none.
            items: the items of the response that are not in the conversation yet.
        """
        with self._tables.writing() as db:
            written = {"input": json.dumps(response.input), "body": json.dumps(response.body)}
            instructions = (response.instructions or "").encode()
            size = sum(map(len, written.values())) + len(instructions) + OVERHEAD
            insert(db, "responses", **(vars(response) | written), owner=owner, bytes=size)
            self._trim(db, "responses", owner)
            if conversation is not None:
                self._append(db, owner, conversation, items)
                db.execute(
                    "UPDATE conversations SET head = ?, read = (SELECT coalesce(max(number), 0) "
                    "FROM items WHERE conversation = conversations.id) WHERE id = ? AND owner = ?",
                    (response.id, conversation, owner),
                )

    def find_items(self, owner: str, names: Collection[str]) -> dict[str, Item]:
        """Find items of responses and conversations by their ids."""
        missing, found = set(names), dict[str, Item]()
        for name in names:
            if name not in missing:
                continue
            row = self._tables.first(
                "SELECT input, body FROM responses WHERE owner = ? AND "
                "(instr(body, ?) OR instr(input, ?)) ORDER BY number DESC LIMIT 1",
                owner,
                *(2 * [json.dumps(name)]),
            )
            kept = [] if row is None else json.loads(row["body"])["output"]
            kept += [] if row is None else json.loads(row["input"])
            row = self._tables.first(
                "SELECT body FROM items WHERE owner = ? AND id = ? LIMIT 1", owner, name
            )
            kept += [] if row is None else [json.loads(row["body"])]
            # Items of one response are often referred to together.
            found |= {item["id"]: item for item in kept if item["id"] in missing}
            missing -= found.keys()
        return found

    def get_response(self, owner: str, name: str) -> StoredResponse | None:
        """Return a response of the owner."""
        row = self._tables.first(
            "SELECT id, session, previous, instructions, input, body FROM responses "
            "WHERE id = ? AND owner = ?",
            name,
            owner,
        )
        if row is None:
            return None
        written = {column: json.loads(row[column]) for column in ("input", "body")}
        return StoredResponse(**{**row, **written})

    def list_responses(self, owner: str, session: str) -> list[str]:
        """Return the ids of the responses in a session of the owner."""
        query = "SELECT id FROM responses WHERE owner = ? AND session = ?"
        return [row["id"] for row in self._tables.query(query, owner, session)]

    def delete_responses(self, owner: str, names: Sequence[str]) -> None:
        """Delete responses of the owner."""
        with self._tables.writing() as db:
            db.execute(
                "DELETE FROM responses WHERE owner = ? AND id IN (SELECT value FROM json_each(?))",
                (owner, json.dumps(list(names))),
            )

    # --- conversations

    def create_conversation(
        self, owner: str, metadata: dict[str, str], items: Sequence[Item]
    ) -> StoredConversation:
        """Begin a conversation."""
        name, written = new_id("conv"), json.dumps(metadata)
        with self._tables.writing() as db:
            db.execute(
                "INSERT INTO conversations VALUES (?, ?, 0, ?, ?, NULL, 0, 1, ?)",
                (name, owner, int(time.time()), written, len(written) + OVERHEAD),
            )
            self._append(db, owner, name, items)
            self._trim(db, "conversations", owner)
        found = self.get_conversation(owner, name)
        assert found is not None
        return found

    def get_conversation(self, owner: str, name: str) -> StoredConversation | None:
        """Return a conversation of the owner."""
        row = self._tables.first(
            "SELECT id, created, metadata, head, read, whole FROM conversations "
            "WHERE id = ? AND owner = ?",
            name,
            owner,
        )
        if row is None:
            return None
        metadata, whole = json.loads(row["metadata"]), bool(row["whole"])
        return StoredConversation(**{**row, "metadata": metadata, "whole": whole})

    def set_metadata(self, owner: str, name: str, metadata: dict[str, str]) -> None:
        """Replace the metadata of a conversation."""
        written = json.dumps(metadata)
        with self._tables.writing() as db:
            db.execute(
                "UPDATE conversations SET metadata = ?, bytes = ? WHERE id = ? AND owner = ?",
                (written, len(written) + OVERHEAD, name, owner),
            )
            # This counts as a use, so that other conversations are deleted first.
            self._append(db, owner, name, [])
            self._trim(db, "conversations", owner)

    def delete_conversation(self, owner: str, name: str) -> None:
        """Delete a conversation and its items."""
        with self._tables.writing() as db:
            db.execute("DELETE FROM conversations WHERE id = ? AND owner = ?", (name, owner))

    def list_items(self, owner: str, conversation: str, after: int = 0) -> list[Item]:
        """Return the items of a conversation with a number above `after`, the oldest first."""
        found = self._tables.query(
            "SELECT body FROM items WHERE conversation = ? AND owner = ? AND number > ? "
            "ORDER BY number",
            conversation,
            owner,
            after,
        )
        return [json.loads(row["body"]) for row in found]

    def page_items(
        self, owner: str, conversation: str, after: str | None, most: int, *, newest: bool
    ) -> list[Item] | None:
        """List at most `most` items of a conversation, in order or the newest first.

        Args:
            owner: the owner of the conversation.
            conversation: its id.
            after: the id of the item before the first one that is listed; None to begin with the
                first item, or with the newest one if `newest` is set.
            most: the largest number of items.
            newest: whether the newest items come first.

        Returns:
            The items; None if the conversation has no item with the id `after`.
        """
        order, compare = ("DESC", "<") if newest else ("ASC", ">")
        start = self._tables.first(
            "SELECT number FROM items WHERE conversation = ? AND owner = ? AND id = ?",
            conversation,
            owner,
            after or "",
        )
        if after is not None and start is None:
            return None
        found = self._tables.query(
            "SELECT body FROM items WHERE conversation = ? AND owner = ? AND "
            f"(? IS NULL OR number {compare} ?) ORDER BY number {order} LIMIT ?",
            conversation,
            owner,
            *(2 * [start["number"] if start else None]),
            most,
        )
        return [json.loads(row["body"]) for row in found]

    def get_item(self, owner: str, conversation: str, name: str) -> Item | None:
        """Return an item of a conversation."""
        query = "SELECT body FROM items WHERE conversation = ? AND owner = ? AND id = ?"
        row = self._tables.first(query, conversation, owner, name)
        return json.loads(row["body"]) if row else None

    def add_items(self, owner: str, conversation: str, items: Sequence[Item]) -> None:
        """Add items to a conversation. The next response reads them."""
        with self._tables.writing() as db:
            self._append(db, owner, conversation, items)

    def remove_item(self, owner: str, conversation: str, name: str) -> None:
        """Delete an item. If it was already read, the next response reads the conversation
        again.
        """
        which = "conversation = ? AND owner = ? AND id = ?"
        values = (conversation, owner, name)
        with self._tables.writing() as db:
            db.execute(
                "UPDATE conversations SET head = NULL, read = 0 WHERE id = ? AND owner = ? AND "
                f"read >= (SELECT number FROM items WHERE {which})",
                (conversation, owner, *values),
            )
            db.execute(f"DELETE FROM items WHERE {which}", values)

    # --- writing

    def _append(
        self, db: sqlite3.Connection, owner: str, conversation: str, items: Sequence[Item]
    ) -> None:
        db.execute(
            "UPDATE conversations SET number = (SELECT 1 + max(number) FROM conversations) "
            "WHERE id = ? AND owner = ?",
            (conversation, owner),
        )
        for item in items:
            written = json.dumps(item)
            facts = {"id": item["id"], "owner": owner, "conversation": conversation}
            insert(db, "items", **facts, body=written, bytes=len(written) + OVERHEAD)
        self._trim(db, "items", owner)

    def _trim(self, db: sqlite3.Connection, table: str, owner: str) -> None:
        """If an owner's rows exceed the limit, delete those with the lowest numbers until the rest
        takes at most nine tenths of the limit.
        """
        ((held,),) = db.execute(
            f"SELECT coalesce(sum(bytes), 0) FROM {table} WHERE owner = ?", (owner,)
        )
        if held <= self._most:
            return
        ((last,),) = db.execute(
            "SELECT max(number) FROM (SELECT number, sum(bytes) OVER (ORDER BY number DESC) AS "
            f"behind FROM {table} WHERE owner = ?) WHERE behind > ?",
            (owner, self._most * 9 // 10),
        )
        if table == "items":
            db.execute(
                "UPDATE conversations SET whole = 0 WHERE id IN (SELECT conversation FROM items "
                "WHERE owner = ? AND number <= ?)",
                (owner, last),
            )
        db.execute(f"DELETE FROM {table} WHERE owner = ? AND number <= ?", (owner, last))
