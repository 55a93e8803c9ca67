"""Saved sessions: checkpoints and records of turns, responses and archives."""

from weir.serve.sessions.archive import SessionArchive
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
from weir.serve.sessions.memory_store import MemoryStore
from weir.serve.sessions.records import (
    DISK_FULL,
    NOT_KEPT,
    Checkpoint,
    LazyCheckpoint,
    NameTaken,
    OnSaved,
    SessionStore,
    SessionSummary,
    StorageFull,
    TurnRecord,
    TurnTokens,
    find_path,
    pack_ids,
    unpack_ids,
)
from weir.serve.sessions.responses import ResponseStore, StoredConversation, StoredResponse
from weir.serve.sessions.snapshot import RowFormat, decode_checkpoint, encode_checkpoint
from weir.serve.sessions.snapshot_folder import free_bytes, is_full
from weir.serve.sessions.sqlite_store import SQLiteStore
from weir.serve.sessions.writer import BackgroundWriter

__all__ = [
    "DISK_FULL",
    "NOT_KEPT",
    "BackgroundWriter",
    "Checkpoint",
    "Item",
    "LazyCheckpoint",
    "MemoryStore",
    "NameTaken",
    "OnSaved",
    "ResponseStore",
    "RowFormat",
    "SQLiteStore",
    "SessionArchive",
    "SessionStore",
    "SessionSummary",
    "StorageFull",
    "StoredConversation",
    "StoredResponse",
    "TurnRecord",
    "TurnTokens",
    "answer_item",
    "answer_part",
    "call_item",
    "decode_checkpoint",
    "encode_checkpoint",
    "find_path",
    "free_bytes",
    "input_item",
    "is_full",
    "messages_of",
    "new_id",
    "pack_ids",
    "result_item",
    "unpack_ids",
]
