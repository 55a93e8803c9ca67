"""The engine: sequences of many sessions through one model, in rows allocated once."""

from weir.serve.engine.compilation import compile_engine, sizes_of
from weir.serve.engine.engine import Cancelled, Engine, EngineLoad
from weir.serve.engine.inspection import RowInspection
from weir.serve.engine.output import (
    Event,
    FailureEvent,
    FinishEvent,
    Notifier,
    OutputQueue,
    StreamStats,
    TokenEvent,
)
from weir.serve.engine.request import Listener, Sequence, Stage
from weir.serve.engine.runner import side_by_side
from weir.serve.engine.sampler import Constraint, SampledToken, Sampler, SamplingParams
from weir.serve.engine.scheduler import Busy, WaitQueue, read_together

__all__ = [
    "Busy",
    "Cancelled",
    "Constraint",
    "Engine",
    "EngineLoad",
    "Event",
    "FailureEvent",
    "FinishEvent",
    "Listener",
    "Notifier",
    "OutputQueue",
    "RowInspection",
    "SampledToken",
    "Sampler",
    "SamplingParams",
    "Sequence",
    "Stage",
    "StreamStats",
    "TokenEvent",
    "WaitQueue",
    "compile_engine",
    "read_together",
    "side_by_side",
    "sizes_of",
]
