"""Endless sessions of many clients at once, through one model."""

from weir.serve.client import EngineClient, GenerationRequest
from weir.serve.engine import (
    Busy,
    Cancelled,
    Engine,
    FailureEvent,
    FinishEvent,
    OutputQueue,
    SampledToken,
    Sampler,
    SamplingParams,
    Sequence,
    TokenEvent,
    compile_engine,
    sizes_of,
)
from weir.serve.limits import Limits
from weir.serve.memory_estimate import estimate_memory
from weir.serve.messages import Message, hash_prefixes
from weir.serve.prompts import Prompt
from weir.serve.sessions import Checkpoint, ResponseStore, SessionStore, TurnRecord

__all__ = [
    "Busy",
    "Cancelled",
    "Checkpoint",
    "Engine",
    "EngineClient",
    "FailureEvent",
    "FinishEvent",
    "GenerationRequest",
    "Limits",
    "Message",
    "OutputQueue",
    "Prompt",
    "ResponseStore",
    "SampledToken",
    "Sampler",
    "SamplingParams",
    "Sequence",
    "SessionStore",
    "TokenEvent",
    "TurnRecord",
    "compile_engine",
    "estimate_memory",
    "hash_prefixes",
    "sizes_of",
]
