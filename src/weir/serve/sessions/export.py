"""Exported sessions: the turns of a session in one safetensors file, which another server can
import.

For each turn, the file has the checkpoint as a tensor of bytes (`Checkpoint.to_bytes`), and the
record and the checkpoint's checksum as text. An imported file is untrusted: everything in it is
validated, and turns get new names. This module knows nothing about databases.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from weir.cache import check_token, located
from weir.errors import WeirError, in_words, quote
from weir.policies import FARTHEST, FileFacts, ListOf, Whole, read_facts
from weir.serve import patterns
from weir.serve.json_nodes import NodeCounter
from weir.serve.messages import Message, ResultPlace
from weir.serve.sessions.records import (
    Checkpoint,
    StorageFull,
    Turn,
    TurnRecord,
    pack_ids,
    unpack_ids,
)
from weir.serve.sessions.snapshot_folder import is_full
from weir.serve.sessions.store_format import StoreFormat
from weir.stream import replace_atomically

FORMAT = 4
KEY = "weir_export"
MAX_FACTS = 16_000_000
"""Largest number of bytes of the text about turns in a file, because all of it is parsed at
once.
"""
HEADER = 16_000_000
"""Additional bytes of a file's header, for escaped quotes and the places of checkpoints."""
FEWER = "export only the newest turns, for example the newest five with ?turns=5"
"""The advice in errors about exports that are too large."""
FACTS = ("node", "parent", "chain", "last", "seen", "usage", "created")
"""Fields of a record that are in the file under the same names and with the same values.

`messages`, `ids` and `kept` are also there, but are converted. Owner and session are not there.
"""


def write_export(path: Path, turns: Sequence[Turn], store_format: StoreFormat) -> None:
    """Write turns of a session, parents first, to a file. If that fails, nothing is written."""
    facts, tensors = [], {}
    for n, (checkpoint, made) in enumerate(turns):
        data = checkpoint.to_bytes()
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
    said = {"format": FORMAT, **store_format.to_json(), "turns": facts}
    metadata = {KEY: json.dumps(said)}
    if len(metadata[KEY]) > MAX_FACTS:
        raise WeirError(
            f"the messages and their tokens take {len(metadata[KEY]):,} bytes, and a file can have "
            f"at most {MAX_FACTS:,} bytes of these. To make it smaller, {FEWER}."
        )
    try:
        with replace_atomically(path) as new:
            save_file(tensors, str(new), metadata=metadata)
    except (OSError, SafetensorError) as error:
        if is_full(error):
            raise StorageFull(
                f"the disk has no room for the file of this session. Make room, or {FEWER}."
            ) from None
        reason = getattr(error, "strerror", None) or error
        raise WeirError(f"the session cannot be written: {reason}") from None


def read_export(path: Path, store_format: StoreFormat, limit: int | None, owner: str) -> list[Turn]:
    """Read turns from a file of at most `limit` bytes, for a new session, under new names.

    Raises WeirError if the file is missing, too large or damaged, or if a turn in it cannot be
    continued here.
    """
    with _opened(path, limit) as (facts, file):
        turns = _validated(facts, file, store_format)
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


def check_facts(_: Any, path: Path, limit: int | None) -> None:
    """Check the text about turns in a file. This is called in a worker, because the text may be
    long.
    """
    with _opened(path, limit):
        pass


@contextmanager
def _opened(path: Path, limit: int | None) -> Iterator[tuple[Any, Any]]:
    """Open a file of turns, and validate its facts. Problems that are found here or by the caller
    are raised as WeirErrors.
    """
    if not path.is_file():
        raise WeirError("the file does not exist")
    size = path.stat().st_size
    if limit is not None and size > limit:
        raise WeirError(f"the file must have at most {limit:,} bytes, got {size:,}")
    try:
        with open(path, "rb") as begun:
            header = int.from_bytes(begun.read(8), "little")
            if header > size - 8:
                raise WeirError(
                    "it does not begin like a session that weir exported, or its end is missing. "
                    "Send the file that a server returned when a session was exported."
                )
            if header > MAX_FACTS + HEADER:
                raise ValueError(f"its header has {header:,} bytes")
            # Refuse a header with too many entries, because listing hundreds of thousands of empty
            # tensors takes seconds.
            NodeCounter(MAX_FACTS).feed(begun.read(header))
        with safe_open(str(path), framework="pt") as file:
            text = (file.metadata() or {})[KEY]
            NodeCounter(MAX_FACTS).feed_text(text)
            facts = json.loads(text)
            version = facts.get("format") if isinstance(facts, dict) else facts
            if version != FORMAT:
                raise WeirError(
                    f"it has the format {quote(version)}, but this version of weir reads {FORMAT}"
                )
            read_facts(_ExportFacts, facts)
            yield facts, file
    except (SafetensorError, OSError, ValueError, LookupError, RecursionError) as error:
        raise WeirError(
            f"the file is damaged or is not a session that weir exported ({quote(str(error))})"
        ) from None
    except WeirError as error:
        raise WeirError(f"the file cannot be imported: {error}") from None


def _validated(facts: Any, file: Any, store_format: StoreFormat) -> list[Turn]:
    """Validate the content of an open file, and make its turns one by one."""
    store_format.check(facts)
    turns = facts["turns"]
    names, wanted = set(file.keys()), [str(n) for n in range(len(turns))]
    if not turns:
        raise WeirError("it has no turns")
    if len(names) != len(turns):
        raise WeirError(
            f"it has {in_words(len(names), 'checkpoint')} for {in_words(len(turns), 'turn')}"
        )
    if unknown := sorted(names - set(wanted)):
        missing = next(name for name in wanted if name not in names)
        raise WeirError(
            f"the checkpoint {quote(missing)} of turns[{missing}] is missing, and the checkpoint "
            f"{quote(unknown[0])} belongs to no turn"
        )
    found: list[Turn] = []
    known: set[str] = set()
    nodes = {turn["node"] for turn in turns}
    for n, turn in enumerate(turns):
        with located(f"turns[{n}]"):
            checkpoint = _read_checkpoint(turn, file, str(n), store_format)
            if turn["node"] in known:
                raise WeirError("another turn has the same name")
            if turn["parent"] in nodes - known:
                raise WeirError("it comes before the turn that it continues")
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


def _read_checkpoint(
    turn: dict[str, Any], file: Any, name: str, store_format: StoreFormat
) -> Checkpoint:
    """Read the checkpoint of a turn, and check that it is the end of this turn."""
    part = file.get_slice(name)
    size = part.get_shape()
    if part.get_dtype() != "U8" or len(size) != 1:
        raise WeirError("its checkpoint must be bytes")
    if size[0] > 2 * store_format.turn_bytes():
        raise WeirError(
            f"its checkpoint has {size[0]:,} bytes, more than any checkpoint of this server"
        )
    data = file.get_tensor(name).numpy().tobytes()
    if hashlib.sha256(data).hexdigest() != turn["sha256"]:
        raise WeirError("it is damaged: its checksum does not match its checkpoint")
    for place, ids in (("last", [turn["last"]]), ("ids", turn["ids"])):
        for token in ids:
            check_token(token, store_format.rows.vocabulary, place)
    checkpoint = Checkpoint.from_bytes(data, store_format.rows, (turn["last"],), trusted=False)
    if turn["seen"] != checkpoint.state.facts["seen"] + 1:
        raise WeirError("it does not end where its checkpoint ends")
    if [place[:2] for place in turn["kept"]] != checkpoint.state.facts["marks"].get("kept", []):
        raise WeirError("the tool results that it keeps are not those of its checkpoint")
    if len(turn["ids"]) > turn["seen"]:
        raise WeirError("it has more tokens than its stream")
    return checkpoint


class _Listed(FileFacts):
    """Facts that a file stores as a list of the fields of the class, in order.

    Attributes:
        counts: the allowed numbers of parts in the list.
    """

    counts: ClassVar[tuple[int, ...]]

    @model_validator(mode="before")
    @classmethod
    def _name_parts(cls, value: Any) -> Any:
        if not isinstance(value, list) or len(value) not in cls.counts:
            wanted = " or ".join(map(str, cls.counts))
            raise PydanticCustomError("parts", "a list of {wanted} parts", {"wanted": wanted})
        return dict(zip(cls.model_fields, value, strict=False))


Hash = Annotated[str, Field(pattern=patterns.CHECKSUM)]


class _CallFacts(_Listed):
    """A call of a function (`Call`)."""

    counts = (3,)
    id: str
    name: str
    arguments: str


class _PlaceFacts(_Listed):
    """The place of the tokens of a result (`ResultPlace`)."""

    counts = (3,)
    start: Whole
    stop: Whole
    chain: Hash


class _MessageFacts(_Listed):
    """A message (`Message.to_json`). A message that has calls or is the result of a call has six
    parts. A result that the model has read also has its place in the stream (`where`).
    """

    counts = (3, 6, 7)
    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str
    name: str | None
    calls: ListOf[_CallFacts] = Field(default_factory=list)
    result: str | None = None
    place: Whole | None = None
    where: _PlaceFacts | None = None


class _TurnFacts(FileFacts):
    """The record of a turn, and the checksum of its checkpoint."""

    node: str
    parent: str | None
    chain: Hash
    messages: ListOf[_MessageFacts]
    last: Whole
    seen: Annotated[Whole, Field(ge=1)]
    usage: dict[str, Whole]
    created: Annotated[float, Field(ge=0, le=FARTHEST, allow_inf_nan=False)]
    ids: ListOf[Whole]
    kept: ListOf[_PlaceFacts]
    sha256: str


class _ExportFacts(FileFacts):
    """The facts in a file, apart from the checkpoints."""

    format: int
    model: dict[str, Any]
    kind: dict[str, Any]
    turns: ListOf[_TurnFacts]
