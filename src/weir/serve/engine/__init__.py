"""The engine: sequences of many sessions through one model, in rows allocated once."""

from weir.serve.engine.engine import (
    Cancelled,
    Engine,
    RowInspection,
    compile_engine,
    sizes_of,
)
from weir.serve.engine.output import (
    EventSender,
    FailureEvent,
    FinishEvent,
    OutputEvent,
    OutputProcessor,
    OutputQueue,
    TokenEvent,
)
from weir.serve.engine.sampler import Constraint, SampledToken, Sampler, SamplingParams
from weir.serve.engine.scheduler import Busy
from weir.serve.engine.sequence import Sequence, Stage

__all__ = [
    "Busy",
    "Cancelled",
    "Constraint",
    "Engine",
    "EventSender",
    "FailureEvent",
    "FinishEvent",
    "OutputEvent",
    "OutputProcessor",
    "OutputQueue",
    "RowInspection",
    "SampledToken",
    "Sampler",
    "SamplingParams",
    "Sequence",
    "Stage",
    "TokenEvent",
    "compile_engine",
    "sizes_of",
]
