"""Endless sessions of many clients at once, through one model."""

from weir.serve.book import Book
from weir.serve.choosing import Choice, Chooser, Choosing, Constraint
from weir.serve.compiling import compile_engine, sizes_of
from weir.serve.desk import Asked, Desk, Wish
from weir.serve.engine import Cancelled, Engine, Load
from weir.serve.limits import Limits
from weir.serve.mailbox import End, Failure, Mailbox, Piece, Standing
from weir.serve.memory import MemoryStore
from weir.serve.messages import Message, chain
from weir.serve.planning import Plan, TooLong
from weir.serve.records import Record, Session, Store
from weir.serve.room import Room, room_for
from weir.serve.sessions import Sessions, Unknown
from weir.serve.shelf import MemoryShelf, Shelf
from weir.serve.turn import Listener, Node, Turn
from weir.serve.waiting import Busy

__all__ = [
    "Asked",
    "Book",
    "Busy",
    "Cancelled",
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
    "MemoryShelf",
    "MemoryStore",
    "Message",
    "Node",
    "Piece",
    "Plan",
    "Record",
    "Room",
    "Session",
    "Sessions",
    "Shelf",
    "Standing",
    "Store",
    "TooLong",
    "Turn",
    "Unknown",
    "Wish",
    "chain",
    "compile_engine",
    "room_for",
    "sizes_of",
]
