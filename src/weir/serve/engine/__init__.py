"""The engine: sequences of many sessions through one model, in rows allocated once."""

from weir.serve.engine.engine import (
    Cancelled,
    Engine,
    EngineLoad,
    RowInspection,
    compile_engine,
    sizes_of,
)
from weir.serve.engine.output import (
    FailureEvent,
    FinishEvent,
    Notifier,
    OutputEvent,
    OutputProcessor,
    OutputQueue,
    StreamStats,
    TokenEvent,
)
from weir.serve.engine.sampler import Constraint, SampledToken, Sampler, SamplingParams, sample
from weir.serve.engine.scheduler import Busy, WaitQueue, fits_one_call, group_prefills
from weir.serve.engine.sequence import Listener, Sequence

__all__ = [
    "Busy",
    "Cancelled",
    "Constraint",
    "Engine",
    "EngineLoad",
    "FailureEvent",
    "FinishEvent",
    "Listener",
    "Notifier",
    "OutputEvent",
    "OutputProcessor",
    "OutputQueue",
    "RowInspection",
    "SampledToken",
    "Sampler",
    "SamplingParams",
    "Sequence",
    "StreamStats",
    "TokenEvent",
    "WaitQueue",
    "compile_engine",
    "fits_one_call",
    "group_prefills",
    "sample",
    "sizes_of",
]
