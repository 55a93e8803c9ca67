"""Session archive: the turns of a session in one safetensors file, to take to another server.

For each turn the file has the snapshot as a tensor of bytes, and as text the record and the
snapshot's checksum. An imported file is untrusted: everything in it is validated, and turns get new
names. Knows nothing about databases.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from weir.cache import FARTHEST, ValidationError, integer, list_of, optional, text
from weir.cache import record as facts_of
from weir.errors import WeirError, quote
from weir.serve.messages import Message
from weir.serve.sessions.records import Checkpoint, SessionStore, TurnRecord, pack_ids, unpack_ids
from weir.serve.sessions.snapshot import RowFormat, anything, decode_foreign, encode_checkpoint
from weir.stream import replace_atomically

FORMAT = 2
KEY = "weir_sessions"


@dataclass
class SessionArchive:
    """Turns of a session, parents first."""

    records: list[TurnRecord] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)

    @classmethod
    def of(cls, store: SessionStore, owner: str, session: str, most: int) -> SessionArchive:
        """Archive the newest turns of an owner's session.

        Raises:
            WeirError: the owner has no such session, or a turn of it is damaged.
        """
        archive = cls()
        for record in store.list_turns(owner, session)[-most:]:
            try:
                found = store.load(record.node)
                archive.add(record, Checkpoint(found.state, found.pending))
            except WeirError:
                if store.find_turn(owner, record.node) is not None:
                    raise
                # Otherwise it was just deleted: leave it out.
        if not archive.records:
            raise WeirError("there is no such session")
        return archive

    def add(self, record: TurnRecord, checkpoint: Checkpoint) -> None:
        """Append a turn."""
        self.records.append(record)
        self.checkpoints.append(checkpoint)

    def renamed(self, owner: str) -> SessionArchive:
        """Copy the turns to a new session of this owner, under new names."""
        session = f"sess_{secrets.token_hex(16)}"
        names = {record.node: secrets.token_hex(16) for record in self.records}
        records = [
            replace(
                record,
                node=names[record.node],
                owner=owner,
                session=session,
                parent=None if record.parent is None else names.get(record.parent),
            )
            for record in self.records
        ]
        return SessionArchive(records, self.checkpoints)

    def write(self, path: Path, row_format: RowFormat) -> None:
        """Write the archive to a file, whole or not at all."""
        snapshots = [encode_checkpoint(row_format, checkpoint) for checkpoint in self.checkpoints]
        facts = {
            "format": FORMAT,
            "turns": [
                {**_record_to_json(record), "sha256": hashlib.sha256(data).hexdigest()}
                for record, data in zip(self.records, snapshots, strict=True)
            ],
        }
        tensors = {
            str(n): torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for n, data in enumerate(snapshots)
        }
        try:
            with replace_atomically(path) as new:
                save_file(tensors, str(new), metadata={KEY: json.dumps(facts)})
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise WeirError(f"the session cannot be written: {reason}") from None

    @classmethod
    def read(cls, path: Path, row_format: RowFormat, limit: int | None) -> SessionArchive:
        """Read an archive from a file.

        Args:
            limit: maximum size in bytes; None for no limit.

        Raises:
            WeirError: it is missing, too large, damaged or no export of weir, or a turn in it
                cannot be continued here.
        """
        if not path.is_file():
            raise WeirError("there is no such file")
        size = path.stat().st_size
        if limit is not None and size > limit:
            raise WeirError(f"the file has {size:,} bytes, and {limit:,} are taken")
        try:
            with safe_open(str(path), framework="pt") as file:
                facts = json.loads((file.metadata() or {})[KEY])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, LookupError, RecursionError) as error:
            raise WeirError(
                f"the file is damaged or no session that weir exported ({quote(str(error))})"
            ) from None
        try:
            return cls._validated(facts, tensors, row_format)
        except (ValidationError, WeirError) as error:
            raise WeirError(f"the file cannot be imported: {error}") from None

    @classmethod
    def _validated(
        cls, facts: Any, tensors: dict[str, torch.Tensor], row_format: RowFormat
    ) -> SessionArchive:
        """Validate the content of a file, and build the archive."""
        facts_of(format=integer(FORMAT, FORMAT), turns=list_of(_turn(row_format.vocabulary)))(
            facts, ""
        )
        turns = facts["turns"]
        if set(tensors) != {str(n) for n in range(len(turns))} or not turns:
            raise ValidationError(f"it has {len(tensors)} snapshots of {len(turns)} turns")
        archive = cls()
        known: set[str] = set()
        names = {turn["node"] for turn in turns}
        for n, turn in enumerate(turns):
            t = tensors[str(n)]
            if t.dtype != torch.uint8 or t.dim() != 1:
                raise ValidationError(f"snapshot {n} is no file")
            data = t.numpy().tobytes()
            if hashlib.sha256(data).hexdigest() != turn.pop("sha256"):
                raise ValidationError(
                    f"turns[{n}] is damaged: its checksum is not that of its snapshot"
                )
            try:
                checkpoint = decode_foreign(row_format, data)
            except WeirError as error:
                raise ValidationError(f"turns[{n}]: {error}") from None
            seen = checkpoint.state.facts["seen"] + len(checkpoint.pending)
            if (turn["last"],) != checkpoint.pending or turn["seen"] != seen:
                raise ValidationError(f"turns[{n}] does not end where its snapshot does")
            if turn["node"] in known:
                raise ValidationError(f"turns[{n}] is there twice")
            if turn["parent"] in names - known:
                raise ValidationError(f"turns[{n}] stands before what it goes on from")
            known.add(turn["node"])
            if len(turn["ids"]) > turn["seen"]:
                raise ValidationError(f"turns[{n}] has more tokens than its stream")
            messages = tuple(Message.from_json(kept) for kept in turn.pop("messages"))
            ids = pack_ids(turn.pop("ids"))
            archive.add(
                TurnRecord(owner="", session="", messages=messages, ids=ids, **turn), checkpoint
            )
        return archive


def _record_to_json(record: TurnRecord) -> dict[str, Any]:
    """Convert a record for an archive, without its owner, session and epoch."""
    names = ("node", "parent", "chain", "messages", "last", "seen", "usage", "created")
    values = {name: getattr(record, name) for name in names}
    values["messages"] = [message.to_json() for message in record.messages]
    return {**values, "ids": unpack_ids(record.ids).tolist()}


def _turn(vocabulary: int) -> Any:
    """Build the validator of a turn's record."""
    return facts_of(
        node=text(),
        parent=optional(text()),
        chain=_chain,
        messages=list_of(_message),
        last=integer(0, vocabulary - 1),
        seen=integer(1),
        usage=_usage,
        created=_time,
        ids=list_of(integer(0, vocabulary - 1)),
        sha256=text(),
    )


def _chain(value: Any, place: str) -> None:
    if not isinstance(value, str) or not set(value) <= set("0123456789abcdef") or len(value) > 64:
        raise ValidationError(f"{place} must be a hash, not {quote(value)}")


def _message(value: Any, place: str) -> None:
    list_of(anything)(value, place)
    if len(value) not in (3, 6):
        raise ValidationError(f"{place} must have 3 parts or 6, not {len(value)}")
    role, content, name, *more = value
    text("system", "user", "assistant", "tool", "developer")(role, f"{place}.role")
    text()(content, f"{place}.content")
    optional(text())(name, f"{place}.name")
    if more:
        calls, result, which = more
        list_of(list_of(text(), 3))(calls, f"{place}.calls")
        optional(text())(result, f"{place}.result")
        optional(integer())(which, f"{place}.place")


def _usage(value: Any, place: str) -> None:
    if not isinstance(value, dict):
        raise ValidationError(f"{place} must be numbers by name, not {quote(value)}")
    for name, number in value.items():
        integer(0, FARTHEST)(number, f"{place}.{quote(name)}")


def _time(value: Any, place: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= FARTHEST:
        raise ValidationError(f"{place} must be seconds since 1970, not {quote(value)}")
