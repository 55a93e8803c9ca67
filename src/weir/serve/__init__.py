"""Endless sessions of many clients at once, through one model."""

from weir.serve.book import Book
from weir.serve.client import Asked, EngineClient, Wish
from weir.serve.engine import (
    Busy,
    Cancelled,
    Constraint,
    Engine,
    EngineLoad,
    FailureEvent,
    FinishEvent,
    Listener,
    Node,
    OutputQueue,
    SampledToken,
    Sampler,
    SamplingParams,
    Sequence,
    Shelf,
    StreamStats,
    TokenEvent,
    compile_engine,
    sizes_of,
)
from weir.serve.limits import Limits
from weir.serve.memory import MemoryStore
from weir.serve.memory_estimate import MemoryEstimate, estimate_memory
from weir.serve.messages import Message, chain
from weir.serve.prefix_match import Plan, TooLong
from weir.serve.records import Record, Session, Store
from weir.serve.sessions import Sessions, Unknown
from weir.serve.shelf import MemoryShelf

__all__ = [
    "Asked",
    "Book",
    "Busy",
    "Cancelled",
    "Constraint",
    "Engine",
    "EngineClient",
    "EngineLoad",
    "FailureEvent",
    "FinishEvent",
    "Limits",
    "Listener",
    "MemoryEstimate",
    "MemoryShelf",
    "MemoryStore",
    "Message",
    "Node",
    "OutputQueue",
    "Plan",
    "Record",
    "SampledToken",
    "Sampler",
    "SamplingParams",
    "Sequence",
    "Session",
    "Sessions",
    "Shelf",
    "Store",
    "StreamStats",
    "TokenEvent",
    "TooLong",
    "Unknown",
    "Wish",
    "chain",
    "compile_engine",
    "estimate_memory",
    "sizes_of",
]
