"""Endless sessions of many clients at once, through one model."""

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
    OutputQueue,
    SampledToken,
    Sampler,
    SamplingParams,
    Sequence,
    StreamStats,
    TokenEvent,
    compile_engine,
    sizes_of,
)
from weir.serve.limits import Limits
from weir.serve.memory_estimate import MemoryEstimate, estimate_memory
from weir.serve.messages import Message, chain
from weir.serve.prefix_match import Plan, TooLong
from weir.serve.sessions import (
    Checkpoint,
    MemoryStore,
    ResponseStore,
    SessionStore,
    SessionSummary,
    TurnRecord,
)

__all__ = [
    "Asked",
    "Busy",
    "Cancelled",
    "Checkpoint",
    "Constraint",
    "Engine",
    "EngineClient",
    "EngineLoad",
    "FailureEvent",
    "FinishEvent",
    "Limits",
    "Listener",
    "MemoryEstimate",
    "MemoryStore",
    "Message",
    "OutputQueue",
    "Plan",
    "ResponseStore",
    "SampledToken",
    "Sampler",
    "SamplingParams",
    "Sequence",
    "SessionStore",
    "SessionSummary",
    "StreamStats",
    "TokenEvent",
    "TooLong",
    "TurnRecord",
    "Wish",
    "chain",
    "compile_engine",
    "estimate_memory",
    "sizes_of",
]
