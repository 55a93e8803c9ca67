"""Session archive: the turns of a session in one safetensors file, to move to another server.

For each turn, the file has the snapshot as a tensor of bytes, and the record and the snapshot's
checksum as text. An imported file is untrusted: everything in it is validated, and its turns get
new names.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from weir.cache import FARTHEST, ValidationError, integer, list_of, optional, record, text
from weir.errors import WeirError, quote
from weir.serve.json_nodes import NodeCounter
from weir.serve.messages import Message, ResultPlace
from weir.serve.sessions.records import StorageFull, Turn, TurnRecord, pack_ids, unpack_ids
from weir.serve.sessions.snapshot import RowFormat, anything, decode_foreign, encode_checkpoint
from weir.serve.sessions.snapshot_folder import is_full
from weir.stream import replace_atomically

FORMAT = 3
KEY = "weir_sessions"
MAX_FACTS = 16_000_000
"""The most bytes of a file's facts about its turns, all of which are parsed at once."""
HEADER = 16_000_000
"""The most bytes of its header besides that: escaped quotes, and the places of snapshots."""
FACTS = ("node", "parent", "chain", "last", "seen", "usage", "created")
"""Facts of a record that are in the file unchanged. Owner and session are not."""


def write_archive(path: Path, turns: Sequence[Turn], row_format: RowFormat) -> None:
    """Write turns of a session to a file, parents first, either completely or not at all."""
    facts, tensors = [], {}
    for n, (checkpoint, made) in enumerate(turns):
        data = encode_checkpoint(row_format, checkpoint)
        tensors[str(n)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        facts.append(
            {
                **{name: getattr(made, name) for name in FACTS},
                "messages": [message.to_json() for message in made.messages],
                "ids": unpack_ids(made.ids).tolist(),
                "kept": [list(place) for place in made.kept],
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        )
    metadata = {KEY: json.dumps({"format": FORMAT, "turns": facts})}
    if len(metadata[KEY]) > MAX_FACTS:
        raise WeirError(
            f"the text of these turns takes {len(metadata[KEY]):,} bytes, and a file can have at "
            f"most {MAX_FACTS:,}. Export fewer of the newest turns."
        )
    try:
        with replace_atomically(path) as new:
            save_file(tensors, str(new), metadata=metadata)
    except (OSError, SafetensorError) as error:
        if is_full(error):
            raise StorageFull(
                "the disk has no room for the file of this session. Free some space, or export "
                "fewer of the newest turns."
            ) from None
        reason = getattr(error, "strerror", None) or error
        raise WeirError(f"the session cannot be written: {reason}") from None


def read_archive(path: Path, row_format: RowFormat, limit: int | None, owner: str) -> list[Turn]:
    """Read turns for a new session from a file of at most `limit` bytes. They get new names.

    Raises WeirError if the file is missing or damaged, or if a turn in it cannot be continued here.
    """
    with _opened(path, limit, row_format.vocabulary) as (facts, file):
        turns = _validated(facts, file, row_format)
    session = f"sess_{secrets.token_hex(16)}"
    names = {made.node: secrets.token_hex(16) for _, made in turns}
    return [
        (
            checkpoint,
            replace(
                made,
                node=names[made.node],
                owner=owner,
                session=session,
                parent=None if made.parent is None else names.get(made.parent),
            ),
        )
        for checkpoint, made in turns
    ]


def check_facts(_: Any, path: Path, limit: int | None, vocabulary: int) -> None:
    """Check a file's facts about its turns in a worker, because they can be long."""
    with _opened(path, limit, vocabulary):
        pass


@contextmanager
def _opened(path: Path, limit: int | None, vocabulary: int) -> Iterator[tuple[Any, Any]]:
    """Open a file of turns, and check that its facts are valid.

    Problems with the file are raised as WeirError, whether they are found here or by the caller.
    """
    if not path.is_file():
        raise WeirError("the file does not exist")
    size = path.stat().st_size
    if limit is not None and size > limit:
        raise WeirError(
            f"the file has {size:,} bytes, and at most {limit:,} are accepted. Export fewer turns."
        )
    try:
        with open(path, "rb") as begun:
            header = int.from_bytes(begun.read(8), "little")
            if header > MAX_FACTS + HEADER:
                raise ValueError(f"its header has {header:,} bytes")
            # Hundreds of thousands of empty tensors take seconds to list.
            NodeCounter(MAX_FACTS).feed(begun.read(header))
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {})[KEY]
            NodeCounter(MAX_FACTS).feed_text(text)
            facts = json.loads(text)
            whole = record(format=integer(FORMAT, FORMAT), turns=list_of(_turn_facts(vocabulary)))
            whole(facts, "")
            yield facts, file
    except (SafetensorError, OSError, ValueError, LookupError, RecursionError) as error:
        raise WeirError(
            f"the file is damaged, or is not a session that weir exported ({quote(str(error))}). "
            "Export the session again."
        ) from None
    except (ValidationError, WeirError) as error:
        raise WeirError(f"the file cannot be imported: {error}") from None


def _validated(facts: Any, file: Any, row_format: RowFormat) -> list[Turn]:
    """Validate the content of an open file, and return its turns."""
    turns = facts["turns"]
    names = set(file.keys())
    if names != {str(n) for n in range(len(turns))} or not turns:
        raise ValidationError(f"it has {len(names)} snapshots for {len(turns)} turns")
    found: list[Turn] = []
    known: set[str] = set()
    nodes = {turn["node"] for turn in turns}
    for n, turn in enumerate(turns):
        snapshot = file.get_slice(str(n))
        size = snapshot.get_shape()
        if snapshot.get_dtype() != "U8" or len(size) != 1:
            raise ValidationError(f"snapshot {n} is not a file of bytes")
        if size[0] > 2 * row_format.turn_bytes():
            raise ValidationError(
                f"snapshot {n} has {size[0]:,} bytes, which is too large for this model and policy"
            )
        data = file.get_tensor(str(n)).numpy().tobytes()
        if hashlib.sha256(data).hexdigest() != turn["sha256"]:
            raise ValidationError(
                f"turns[{n}] is damaged: its checksum does not match its snapshot"
            )
        try:
            checkpoint = decode_foreign(row_format, data)
        except WeirError as error:
            raise ValidationError(f"turns[{n}]: {error}") from None
        seen = checkpoint.state.facts["seen"] + len(checkpoint.pending)
        if (turn["last"],) != checkpoint.pending or turn["seen"] != seen:
            raise ValidationError(f"turns[{n}] does not end where its snapshot does")
        kept = checkpoint.state.facts["marks"].get("kept", [])
        if [place[:2] for place in turn["kept"]] != kept:
            raise ValidationError(f"turns[{n}] keeps other outputs than its snapshot")
        if turn["node"] in known:
            raise ValidationError(f"turns[{n}] occurs twice")
        if turn["parent"] in nodes - known:
            raise ValidationError(f"turns[{n}] comes before the turn that it continues")
        if len(turn["ids"]) > turn["seen"]:
            raise ValidationError(f"turns[{n}] has more tokens than its stream")
        known.add(turn["node"])
        made = TurnRecord(
            owner="",
            session="",
            messages=tuple(Message.from_json(kept) for kept in turn["messages"]),
            ids=pack_ids(turn["ids"]),
            kept=tuple(ResultPlace(*place) for place in turn["kept"]),
            **{name: turn[name] for name in FACTS},
        )
        found.append((checkpoint, made))
    return found


def _turn_facts(vocabulary: int) -> Any:
    """Build the validator of a turn's record."""
    token = integer(0, vocabulary - 1)
    return record(
        node=text(),
        parent=optional(text()),
        chain=_chain,
        messages=list_of(_message),
        last=token,
        seen=integer(1),
        usage=_usage,
        created=_time,
        ids=list_of(token),
        kept=list_of(_result_place),
        sha256=text(),
    )


def _chain(value: Any, place: str) -> None:
    if not isinstance(value, str) or not set(value) <= set("0123456789abcdef") or len(value) > 64:
        raise ValidationError(f"{place} must be a hash, got {quote(value)}")


def _message(value: Any, place: str) -> None:
    list_of(anything)(value, place)
    if len(value) not in (3, 6, 7):
        raise ValidationError(f"{place} must have 3, 6 or 7 parts, got {len(value)}")
    role, content, name, *more = value
    text("system", "user", "assistant", "tool", "developer")(role, f"{place}.role")
    text()(content, f"{place}.content")
    optional(text())(name, f"{place}.name")
    if more:
        calls, result, which, *where = more
        for one in where:
            _result_place(one, f"{place}.where")
        list_of(list_of(text(), 3))(calls, f"{place}.calls")
        optional(text())(result, f"{place}.result")
        optional(integer())(which, f"{place}.place")


def _result_place(value: Any, place: str) -> None:
    list_of(anything, 3)(value, place)
    for number in value[:2]:
        integer(0, FARTHEST)(number, place)
    _chain(value[2], place)


def _usage(value: Any, place: str) -> None:
    if not isinstance(value, dict):
        raise ValidationError(f"{place} must be an object with numbers, got {quote(value)}")
    for name, number in value.items():
        integer(0, FARTHEST)(number, f"{place}.{quote(name)}")


def _time(value: Any, place: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= FARTHEST:
        raise ValidationError(f"{place} must be a time in seconds since 1970, got {quote(value)}")
