"""The files of a turn that replicas share: its snapshot, and its record beside it.

Files are named by what the server named itself, and nothing in them is code. Knows nothing about
which turns count.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from weir.errors import WeirError
from weir.serve.cluster.shared import Shared
from weir.serve.messages import Message
from weir.serve.sessions import (
    Checkpoint,
    LazyCheckpoint,
    RowFormat,
    TurnRecord,
    decode_checkpoint,
    encode_checkpoint,
)


class TurnFiles:
    """Snapshots and records, in a folder for each session.

    Args:
        shared: where they are.
        form: what rows are rows of.

    Raises:
        WeirError: what is there is of another model or policy.
    """

    def __init__(self, shared: Shared, form: RowFormat) -> None:
        self._shared = shared
        self._form = form
        shared.create("form.json", json.dumps(form.to_json()).encode())
        data = shared.read("form.json")
        try:
            form.check(json.loads(data or b"null"))
        except (WeirError, ValueError) as error:
            raise WeirError(
                f"the shared folder cannot be used here: {error}; give it its own model and "
                "policy, or another folder"
            ) from None

    def snapshot(self, node: Checkpoint) -> bytes:
        """A node as a file."""
        return encode_checkpoint(self._form, Checkpoint(node.state, node.pending))

    def write(self, folder: str, record: TurnRecord, snapshot: bytes) -> None:
        """Write both files of a turn.

        Raises:
            WeirError: they cannot be written.
        """
        try:
            self._shared.write(f"{folder}/{record.node}.safetensors", snapshot)
            self._shared.write(f"{folder}/{record.node}.json", json.dumps(_said(record)).encode())
        except OSError as error:
            reason = error.strerror or error
            raise WeirError(f"the turn cannot be kept in the shared folder: {reason}") from None

    def record(self, folder: str, name: str) -> TurnRecord | None:
        """The record of a turn; None if it is not there, or cannot be read."""
        data = self._shared.read(f"{folder}/{name}.json")
        if data is None:
            return None
        try:
            return _record(json.loads(data))
        except (ValueError, TypeError, LookupError):
            return None

    def node(self, folder: str, record: TurnRecord) -> Checkpoint:
        """The node of a turn, read when its state is asked for."""

        def now() -> Checkpoint:
            data = self._shared.read(f"{folder}/{record.node}.safetensors")
            if data is None:
                raise WeirError("what this turn goes on from is not kept any more")
            node = decode_checkpoint(self._form, data)
            if node.pending != (record.last,):
                raise WeirError("what this turn goes on from is the end of another one")
            return node

        return LazyCheckpoint((record.last,), now)

    def delete(self, folder: str, name: str) -> None:
        """Remove both files of a turn, if they are there."""
        for kind in ("json", "safetensors"):
            self._shared.delete(f"{folder}/{name}.{kind}")

    def keep_only(self, folder: str, names: Collection[str]) -> None:
        """Remove the files of all other turns in a folder."""
        for file in self._shared.names(folder):
            name, _, kind = file.partition(".")
            if kind in ("json", "safetensors") and name not in names:
                self._shared.delete(f"{folder}/{file}")


def _said(record: TurnRecord) -> dict[str, Any]:
    said = {each.name: getattr(record, each.name) for each in fields(record)}
    said["messages"] = [each.to_json() for each in record.messages]
    said["ids"] = record.ids.hex()
    return said


def _record(said: dict[str, Any]) -> TurnRecord:
    messages = tuple(Message.from_json(each) for each in said["messages"])
    return TurnRecord(**{**said, "messages": messages, "ids": bytes.fromhex(said["ids"])})
