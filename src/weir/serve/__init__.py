"""Serve endless sessions of many clients with one model."""

from weir.serve.client import EngineClient
from weir.serve.engine.engine import Engine, compile_engine, sizes_of
from weir.serve.engine.sampler import SampledToken, Sampler, SamplingParams
from weir.serve.engine.sequence import TokenSequence
from weir.serve.limits import Limits
from weir.serve.memory_estimate import MemoryEstimate, choose_pin, estimate_memory
from weir.serve.sessions.records import Checkpoint, TurnRecord
from weir.serve.sessions.responses import ResponseStore
from weir.serve.sessions.store import SessionStore
from weir.serve.worker import WorkerProcess
