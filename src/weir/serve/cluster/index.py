"""How turns and sessions are found on shared storage: small files whose names are hashes.

An entry is a hint: what it leads to is looked at, and may have gone. Names and owners that come
from clients are hashed, and never part of a path. Knows nothing about which turns count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict

from weir.serve.cluster.shared import Shared
from weir.serve.sessions import SessionSummary, TurnRecord


def _hash(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def folder_of(owner: str, session: str) -> str:
    """The folder of a session."""
    name = _hash(owner, session)
    return f"sessions/{name[:2]}/{name}"


class Index:
    """Which session a turn is in, and which sessions an owner has.

    Args:
        shared: where the entries are.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._read: dict[str, SessionSummary] = {}  # entries of sessions never change

    def chain(self, owner: str, chain: str) -> str | None:
        """The session whose turn was the last to end a conversation of this hash."""
        return self._session(_place("chains", owner, chain))

    def node(self, owner: str, node: str) -> str | None:
        """The session of a turn."""
        return self._session(_place("nodes", owner, node))

    def sessions(self, owner: str) -> list[SessionSummary]:
        """The sessions of an owner as they stood when a turn ended last."""
        folder = f"owners/{_hash(owner)}"
        newest: dict[str, str] = {}
        for name in self._shared.names(folder):  # sorted, so that the last of a session wins
            newest[name.partition("-")[0]] = name
        found = []
        for name in newest.values():
            path = f"{folder}/{name}"
            if path not in self._read:
                data = self._shared.read(path)
                if data is None:
                    continue  # it has just been replaced
                self._read[path] = SessionSummary(**json.loads(data))
            found.append(self._read[path])
        kept = {f"{folder}/{name}" for name in newest.values()}
        for path in [p for p in self._read if p.startswith(f"{folder}/") and p not in kept]:
            del self._read[path]
        return found

    def add(self, record: TurnRecord) -> None:
        """A turn has ended."""
        entry = json.dumps([record.session, record.node]).encode()
        for kind, name in (("chains", record.chain), ("nodes", record.node)):
            self._shared.write(_place(kind, record.owner, name), entry)

    def remove(self, record: TurnRecord) -> None:
        """A turn is not kept any more."""
        self._shared.delete(_place("nodes", record.owner, record.node))
        path = _place("chains", record.owner, record.chain)
        data = self._shared.read(path)
        if data is not None and json.loads(data)[1] == record.node:
            self._shared.delete(path)

    def stands(self, owner: str, session: str, now: SessionSummary | None) -> None:
        """A session stands elsewhere than before, or is gone."""
        folder, name = f"owners/{_hash(owner)}", _hash(owner, session)
        before = [each for each in self._shared.names(folder) if each.startswith(name)]
        entry = None
        if now is not None:
            entry = f"{name}-{round(now.used * 1e6):020}-{now.head[:8]}.json"
            self._shared.write(f"{folder}/{entry}", json.dumps(asdict(now)).encode())
        for each in before:
            if each != entry:
                self._shared.delete(f"{folder}/{each}")

    def _session(self, path: str) -> str | None:
        data = self._shared.read(path)
        if data is None:
            return None
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return str(json.loads(data)[0])
        return None


def _place(kind: str, owner: str, name: str) -> str:
    found = _hash(owner, name)
    return f"{kind}/{found[:2]}/{found}"
