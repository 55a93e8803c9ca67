"""Endless sessions of many clients at once, through one model."""

from weir.serve.client import EngineClient
from weir.serve.engine import (
    Engine,
    SampledToken,
    Sampler,
    SamplingParams,
    Sequence,
    compile_engine,
    sizes_of,
)
from weir.serve.limits import Limits
from weir.serve.memory_estimate import estimate_memory
from weir.serve.sessions import Checkpoint, ResponseStore, SessionStore, TurnRecord

__all__ = [
    "Checkpoint",
    "Engine",
    "EngineClient",
    "Limits",
    "ResponseStore",
    "SampledToken",
    "Sampler",
    "SamplingParams",
    "Sequence",
    "SessionStore",
    "TurnRecord",
    "compile_engine",
    "estimate_memory",
    "sizes_of",
]
