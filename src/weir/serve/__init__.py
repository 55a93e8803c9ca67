"""Endless sessions of many clients at once, through one model."""

from weir.serve.choosing import Choice, Chooser, Choosing, Constraint
from weir.serve.compiling import compile_engine, sizes_of
from weir.serve.desk import Asked, Desk, Wish
from weir.serve.engine import Cancelled, Engine, Load
from weir.serve.limits import Limits
from weir.serve.mailbox import End, Failure, Mailbox, Piece, Standing
from weir.serve.messages import Message, chain
from weir.serve.planning import Plan, TooLong
from weir.serve.room import Room, room_for
from weir.serve.sessions import (
    Checkpoint,
    CheckpointStore,
    MemoryCheckpoints,
    MemoryStore,
    ResponseStore,
    SessionStore,
    SessionSummary,
    TurnRecord,
)
from weir.serve.sessions.manager import SessionManager, UnknownSession
from weir.serve.turn import Listener, Turn
from weir.serve.waiting import Busy

__all__ = [
    "Asked",
    "Busy",
    "Cancelled",
    "Checkpoint",
    "CheckpointStore",
    "Choice",
    "Chooser",
    "Choosing",
    "Constraint",
    "Desk",
    "End",
    "Engine",
    "Failure",
    "Limits",
    "Listener",
    "Load",
    "Mailbox",
    "MemoryCheckpoints",
    "MemoryStore",
    "Message",
    "Piece",
    "Plan",
    "ResponseStore",
    "Room",
    "SessionManager",
    "SessionStore",
    "SessionSummary",
    "Standing",
    "TooLong",
    "Turn",
    "TurnRecord",
    "UnknownSession",
    "Wish",
    "chain",
    "compile_engine",
    "room_for",
    "sizes_of",
]
