"""Work on what clients send, apart from the thread that answers: in processes where it is large.

One interpreter runs one thread at a time. Were large bodies parsed, rendered and tokenized beside
the engine, each of its steps would wait for them hundreds of times. Functions that are called here
take first what the worker was opened with. Knows nothing about HTTP, prompts or rows.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from weir.errors import WeirError
from weir.serve.engine.scheduler import Busy
from weir.stream import make_way

LOG = logging.getLogger("weir.serve")
SECONDS = 120.0
"""Time limit of one call: all that is done for a client is bounded, and ends far sooner."""
NICE = 5
"""By how much the processes give way to the one that answers."""
PROCESSES = 2
COLLECTED = (10_000, 10, 100)
"""Thresholds of the collector of garbage; by default it looks at all that a large body has made
several times while the body is parsed, which takes longer than to parse it.
"""
RATE = 1_000_000
"""Bytes for which a call waits a second longer than a small one of the same client."""
PIECE = 1_048_576
"""Bytes of a message that are sent at once. Python copies what a pipe receives, but only a piece at
a time.
"""
M_MMAP_THRESHOLD = -3
"""The number that glibc's `mallopt` has for the size from which buffers are the system's own."""
holder_of_call: ContextVar[str] = ContextVar("holder_of_call", default="")
"""The client that a call is for."""

_Step = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function, and what it is given after the value that it is called with."""


class Worker:
    """Works in the thread that asks, one call at a time; a call with a template that turns out to
    be slow, or to have no end, makes way and goes on behind others like it.
    """

    def __init__(self) -> None:
        self._lock, self._slow = threading.Lock(), threading.Lock()
        self._opened: Any = None

    def open(self, given: Any) -> None:
        """Say what functions get before what they are called with; it can be pickled."""
        self._opened = given

    @property
    def opened(self) -> Any:
        """What functions get first."""
        return self._opened

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function of a module; whatever it raises is raised here."""
        held = self._lock

        def give_way() -> None:
            nonlocal held
            held.release()
            held = self._slow
            held.acquire()

        held.acquire()
        token = make_way.set(give_way)
        try:
            return function(self._opened, *given)
        finally:
            make_way.reset(token)
            held.release()

    def split(self, function: Callable[..., Any], *given: Any) -> tuple[Any, Handle]:
        """Call a function that makes something small and something large, which is held."""
        small, large = self.call(function, *given)
        return small, Handle(self, large)

    def vet(self, function: Callable[..., Any], *given: Any) -> None:
        """Let a process find what is wrong with something that is then worked on here."""

    def hold(self, value: Any) -> Handle:
        """Hold a value for several calls."""
        return Handle(self, value)


class Handle:
    """A value that a worker works on."""

    def __init__(self, worker: Worker, value: Any) -> None:
        self._worker = worker
        self._value = value

    def get(self) -> Any:
        """The value itself."""
        return self._value

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function with the value."""
        return self._worker.call(function, self._value, *given)

    def map(self, function: Callable[..., Any], *given: Any) -> Handle:
        """Hold what a function makes of the value; what it raises may be raised only where that is
        used.
        """
        return Handle(self._worker, self.call(function, *given))


class CallQueue:
    """Decides whose call is next.

    A client has one process at a time, so that there is another one for everybody else. Clients
    take turns. Of the calls of one client, a small one goes before a large one that came a little
    earlier.

    Args:
        processes: those that are free.
    """

    def __init__(self, processes: Iterable[WorkerOfMany]) -> None:
        self._free = list(processes)
        self._changed = threading.Condition()
        self._waiting: list[WaitingCall] = []
        self._working: set[str] = set()
        self._served: dict[str, int] = {}  # when a client had its last turn, on a clock of its own
        self._clock = 0
        self._is_closed = False

    @contextlib.contextmanager
    def take(self, holder: str, size: int) -> Iterator[WorkerOfMany]:
        """Wait for a process for a call with so many bytes; Busy if there will be none."""
        call = WaitingCall(holder, time.monotonic() + size / RATE)
        with self._changed:
            self._waiting.append(call)
            self._changed.wait_for(lambda: self._is_closed or (self._free and self._next() is call))
            self._waiting.remove(call)
            if self._is_closed:
                raise Busy("the server is ending")
            process = self._free.pop()
            self._working.add(holder)
            self._clock += 1
            self._served[holder] = self._clock
            self._changed.notify_all()  # another process may be free for another client
        try:
            yield process
        finally:
            with self._changed:
                self._free.append(process)
                self._working.remove(holder)
                if not self._waiting:
                    self._served.clear()
                self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _next(self) -> WaitingCall | None:
        able = (call for call in self._waiting if call.holder not in self._working)
        return min(able, key=lambda one: (self._served.get(one.holder, 0), one.due), default=None)


@dataclass(frozen=True, eq=False)
class WaitingCall:
    """A call that waits; of one client, what is `due` first goes first."""

    holder: str
    due: float


class WorkerProcess(Worker):
    """Works in processes of low priority, each of which is started again if it is lost.

    Args:
        fork: share this process' memory. There must be no other threads yet, nor open files that
            others wait for.
        processes: their number. With two, a client whose bodies take long to refuse cannot keep
            others waiting.
    """

    def __init__(self, *, fork: bool = False, processes: int = PROCESSES) -> None:
        super().__init__()
        method = "fork" if fork and sys.platform == "linux" else "spawn"
        self._processes: list[WorkerOfMany] = []
        for _ in range(processes):
            self._processes.append(WorkerOfMany(method, [one.pipe for one in self._processes]))
        self._queue = CallQueue(self._processes)

    def open(self, given: Any) -> None:
        """Say what functions get before what they are called with."""
        super().open(given)
        for process in self._processes:
            process.opened = given
            _value_of(process.ask(_Message((_keep, (given,)))))

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function; Busy if the process is lost meanwhile, WeirError if it takes too long.

        A bytearray is sent as it is, and emptied as soon as it is sent: a large body must not be
        here while a process works on it.
        """
        consumed = [each for each in given if isinstance(each, bytearray)]
        given = tuple(pickle.PickleBuffer(o) if isinstance(o, bytearray) else o for o in given)
        message = _Message((function, given))
        del given
        with self._queue.take(holder_of_call.get(), message.size) as process:
            answer = process.ask(message, consumed)
        return _value_of(answer)

    def split(self, function: Callable[..., Any], *given: Any) -> tuple[Any, Handle]:
        """Call a function that makes something small and something large, which is held."""
        small, data = self.call(_pack_second, function, *given)
        return small, _Packed(self, data)

    def vet(self, function: Callable[..., Any], *given: Any) -> None:
        """Call a function for what it raises."""
        self.call(function, *given)

    def hold(self, value: Any) -> Handle:
        """Hold a value as bytes that only the processes read."""
        return _Packed(self, pickle.dumps(value, 5))

    def close(self) -> None:
        """End the processes."""
        self._queue.close()
        for process in self._processes:
            process.close()


class WorkerOfMany:
    """One process, and the pipe to it.

    Args:
        method: how it is started: "fork" or "spawn".
        inherited: pipes of this process that a copy of it must close.

    Attributes:
        opened: what a process that is started again is opened with.
    """

    def __init__(self, method: str, inherited: Sequence[Connection] = ()) -> None:
        self.opened: Any = None
        self._lock = threading.Lock()
        self._start(method, inherited)

    def ask(self, message: _Message, consumed: Sequence[bytearray] = ()) -> tuple[bool, Any]:
        """Make a call; return whether it was good, and what it returned or raised.

        Bytearrays that are `consumed` are emptied as soon as the message is sent.
        """
        with self._lock:
            try:
                if not self._process.is_alive():
                    self._restart()
                message.send(self.pipe)
                _drop(consumed)
                if not self.pipe.poll(SECONDS):
                    self._kill()
                    raise WeirError("this takes too long to read; send less at once")
                answer: tuple[bool, Any] = _read(_receive(self.pipe))
            except (EOFError, OSError):
                self._kill()
                LOG.error("a worker process is lost, and is started again")
                raise Busy("the process that reads large requests was lost") from None
        return answer

    def close(self) -> None:
        """End the process."""
        self._kill()
        self.pipe.close()

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _start(self, method: str, inherited: Sequence[Connection] = ()) -> None:
        context = multiprocessing.get_context(method)
        self.pipe, theirs = context.Pipe()
        target: Any = context  # its `Process` is one of the method's
        copied = [*inherited, self.pipe] if method == "fork" else []
        self._process = target.Process(
            target=_serve, args=(theirs, copied), name="weir-worker", daemon=True
        )
        self._process.start()
        theirs.close()

    def _restart(self) -> None:
        """Start the process again: this one has threads by now, and cannot be copied."""
        self.pipe.close()
        self._start("spawn")
        _Message((_keep, (self.opened,))).send(self.pipe)
        _receive(self.pipe)


class _Packed(Handle):
    """A value that a process holds as bytes: one copy, whatever is done with it.

    Args:
        steps: functions that are called with the value wherever it is unpacked, each with what else
            it is given.
    """

    _worker: WorkerProcess

    def __init__(self, worker: WorkerProcess, value: Any, steps: tuple[_Step, ...] = ()) -> None:
        super().__init__(worker, value)
        self._steps = steps

    def __reduce__(self) -> tuple[Any, ...]:
        """In the process it is the value. The bytes go there as they are, and are dropped there as
        soon as they are read.
        """
        return _unpack, (pickle.PickleBuffer(self._value), self._steps)

    def get(self) -> Any:
        return _unpack(self._value, self._steps, self._worker.opened)

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        return self._worker.call(function, self, *given)

    def map(self, function: Callable[..., Any], *given: Any) -> Handle:
        return _Packed(self._worker, self._value, (*self._steps, (function, given)))


class _Message:
    """Something that is sent to the other process; its buffers are not copied."""

    def __init__(self, value: Any) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        self._data = pickle.dumps(value, 5, buffer_callback=self._buffers.append)

    @property
    def size(self) -> int:
        """Its bytes, while it is not sent."""
        return len(self._data) + sum(buffer.raw().nbytes for buffer in self._buffers)

    def send(self, pipe: Connection) -> None:
        """Send it, and let its buffers go."""
        raws = [buffer.raw() for buffer in self._buffers]
        pipe.send_bytes(pickle.dumps([len(self._data), *(raw.nbytes for raw in raws)]))
        for raw in (memoryview(self._data), *raws):
            for at in range(0, raw.nbytes, PIECE):
                pipe.send_bytes(raw[at : at + PIECE])
            raw.release()
        for buffer in self._buffers:
            buffer.release()


def _drop(consumed: Sequence[bytearray]) -> None:
    """Empty bytearrays, and return the memory of large ones to the system."""
    size = sum(map(len, consumed))
    for each in consumed:
        each.clear()
    if size >= PIECE:
        with contextlib.suppress(OSError, AttributeError, TypeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)


def _return_large_buffers() -> None:
    """Let the C library return each large buffer to the system when it is freed.

    glibc no longer does so for buffers of up to 32 MB once one of that size has been freed, as
    happens while a model is loaded. The buffers of a body would then stay in this process.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # only glibc has it
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, PIECE)


def _receive(pipe: Connection) -> list[bytearray]:
    """The parts of a message of the other process: what it says, and its buffers."""
    return [_receive_bytes(pipe, size) for size in pickle.loads(pipe.recv_bytes())]


def _read(parts: list[bytearray]) -> Any:
    """What a message says; its parts are let go."""
    data, *buffers = parts
    parts.clear()
    return pickle.loads(data, buffers=buffers)


def _receive_bytes(pipe: Connection, size: int) -> bytearray:
    """So many bytes, with no copy of more than a piece."""
    received = bytearray(size)
    with memoryview(received) as view:
        for at in range(0, size, PIECE):
            pipe.recv_bytes_into(view[at : at + PIECE])
    return received


def _unpack(data: Any, steps: tuple[_Step, ...], *opened: Any) -> Any:
    """The value of a handle."""
    value = pickle.loads(data)
    (kept,) = opened or _KEPT
    for function, given in steps:
        value = function(kept, value, *given)
    return value


# --- in the process


def _pack_second(
    opened: Any, function: Callable[..., Any], *given: Any
) -> tuple[Any, pickle.PickleBuffer]:
    small, large = function(opened, *given)
    return small, pickle.PickleBuffer(pickle.dumps(large, 5))


_KEPT: list[Any] = [None]


def _keep(_: Any, given: Any) -> None:
    _KEPT[0] = given


def _serve(pipe: Connection, inherited: Sequence[Connection]) -> None:
    """Answer calls until the other end is closed."""
    for other in inherited:
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to all; answers are to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(NICE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a copied process are not there
    torch.set_num_threads(1)
    _return_large_buffers()
    gc.freeze()
    gc.set_threshold(*COLLECTED)
    with contextlib.suppress(EOFError, OSError):
        while True:
            _answer(_receive(pipe)).send(pipe)


def _answer(parts: list[bytearray]) -> _Message:
    try:
        function, given = _read(parts)
        return _Message((True, function(_KEPT[0], *given)))
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> _Message:
    try:
        return _Message((False, (type(error), error.args, error.__dict__)))
    except Exception:  # some hold what cannot be pickled
        return _Message((False, (RuntimeError, (f"{type(error).__name__}: {error}",), {})))


def _restored(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """The exception of another process; its own constructor may want other arguments."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def _value_of(answer: tuple[bool, Any]) -> Any:
    """What a call returned; raises what it raised."""
    good, value = answer
    if good:
        return value
    raise _restored(*value)
