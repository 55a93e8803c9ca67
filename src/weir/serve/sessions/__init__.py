"""Saved sessions: checkpoints and records of turns, responses and archives."""

from weir.serve.sessions.disk_turns import DiskTurns
from weir.serve.sessions.items import (
    Item,
    answer_item,
    answer_part,
    call_item,
    input_item,
    messages_of,
    new_id,
    result_item,
)
from weir.serve.sessions.records import (
    DISK_FULL,
    NOT_KEPT,
    Checkpoint,
    NameTaken,
    SessionSummary,
    StorageFull,
    Turn,
    TurnRecord,
    TurnTokens,
    find_path,
    pack_ids,
    unpack_ids,
)
from weir.serve.sessions.responses import ResponseStore, StoredConversation, StoredResponse
from weir.serve.sessions.snapshot import RowFormat, decode_checkpoint, encode_checkpoint
from weir.serve.sessions.snapshot_folder import free_bytes, refusal
from weir.serve.sessions.store import SessionStore
from weir.serve.sessions.turn_tables import TurnTables

__all__ = [
    "DISK_FULL",
    "NOT_KEPT",
    "Checkpoint",
    "DiskTurns",
    "Item",
    "NameTaken",
    "ResponseStore",
    "RowFormat",
    "SessionStore",
    "SessionSummary",
    "StorageFull",
    "StoredConversation",
    "StoredResponse",
    "Turn",
    "TurnRecord",
    "TurnTables",
    "TurnTokens",
    "answer_item",
    "answer_part",
    "call_item",
    "decode_checkpoint",
    "encode_checkpoint",
    "find_path",
    "free_bytes",
    "input_item",
    "messages_of",
    "new_id",
    "pack_ids",
    "refusal",
    "result_item",
    "unpack_ids",
]
