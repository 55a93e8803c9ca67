"""Endless sessions of many clients at once, through one model."""

from weir.serve.client import EngineClient, Generation, GenerationRequest
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
from weir.serve.messages import Message, hash_prefixes
from weir.serve.prompts import Prompt
from weir.serve.sessions import (
    Checkpoint,
    MemoryStore,
    ResponseStore,
    SessionStore,
    SessionSummary,
    TurnRecord,
)

__all__ = [
    "Busy",
    "Cancelled",
    "Checkpoint",
    "Constraint",
    "Engine",
    "EngineClient",
    "EngineLoad",
    "FailureEvent",
    "FinishEvent",
    "Generation",
    "GenerationRequest",
    "Limits",
    "Listener",
    "MemoryEstimate",
    "MemoryStore",
    "Message",
    "OutputQueue",
    "Prompt",
    "ResponseStore",
    "SampledToken",
    "Sampler",
    "SamplingParams",
    "Sequence",
    "SessionStore",
    "SessionSummary",
    "StreamStats",
    "TokenEvent",
    "TurnRecord",
    "compile_engine",
    "estimate_memory",
    "hash_prefixes",
    "sizes_of",
]
