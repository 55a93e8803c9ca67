"""Process large requests from clients in separate processes.

An interpreter runs one thread at a time. If large bodies were parsed, rendered and tokenized in the
engine's process, each of the engine's steps would wait for them hundreds of times. The first
argument of every function that a worker calls is the value that the worker was opened with.
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
"""Time limit of one call in seconds. All work for a client is limited, and ends far sooner."""
NICE = 5
"""Niceness of the worker processes, which lets the answering process run first."""
PROCESSES = 2
COLLECTED = (10_000, 10, 100)
"""Thresholds of the garbage collector.

With the default thresholds, the collector runs several times while a large body is parsed, and each
time scans everything that was created so far. This takes longer than parsing.
"""
RATE = 1_000_000
"""A call of this many bytes counts as if it had come one second later, in the order of its
client's calls. So a small call that comes soon after a large call of the same client goes first.
"""
PIECE = 1_048_576
"""Bytes of a message that are sent at a time.

Python copies what it receives from a pipe. Because messages are sent in pieces, it never copies
more than one piece at a time.
"""
M_MMAP_THRESHOLD = -3
"""The number of an option of glibc's `mallopt`: the size from which a buffer is requested directly
from the system.
"""
holder_of_call: ContextVar[str] = ContextVar("holder_of_call", default="")
"""The client that a call is for."""

_Step = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function, and its arguments after the first two: the opened value, and the value that a handle
holds.
"""


class Worker:
    """Works in the calling thread, one call at a time.

    If a chat template takes long, or does not finish, its call lets other calls run. It continues
    when no other call of this kind is running.
    """

    def __init__(self) -> None:
        self._lock, self._slow = threading.Lock(), threading.Lock()
        self._opened: Any = None

    def open(self, given: Any) -> None:
        """Set the first argument of functions, a value that can be pickled."""
        self._opened = given

    @property
    def opened(self) -> Any:
        """The first argument of functions."""
        return self._opened

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function of a module. Its exceptions are raised here."""
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
        """Call a function that returns something small and something large. The large part is
        held.
        """
        small, large = self.call(function, *given)
        return small, Handle(self, large)

    def vet(self, function: Callable[..., Any], *given: Any) -> None:
        """Check data before it is processed here. Only a worker with processes checks anything."""

    def hold(self, value: Any) -> Handle:
        """Hold a value for several calls."""
        return Handle(self, value)


class Handle:
    """A value that a worker processes."""

    def __init__(self, worker: Worker, value: Any) -> None:
        self._worker = worker
        self._value = value

    def get(self) -> Any:
        """Return the value itself."""
        return self._value

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function with the value."""
        return self._worker.call(function, self._value, *given)

    def map(self, function: Callable[..., Any], *given: Any) -> Handle:
        """Call a function with the value, and hold the result.

        The function may be called later, when the result is used. Its exceptions are then raised
        there.
        """
        return Handle(self._worker, self.call(function, *given))


class CallQueue:
    """Decides whose call is next.

    A client has one process at a time, so that there is another one for all other clients. Clients
    take turns. Among the calls of one client, a small call goes before a large call that came a
    little earlier.

    Args:
        processes: the free processes.
    """

    def __init__(self, processes: Iterable[WorkerOfMany]) -> None:
        self._free = list(processes)
        self._changed = threading.Condition()
        self._waiting: list[WaitingCall] = []
        self._working: set[str] = set()
        self._served: dict[str, int] = {}  # when a client had its last turn, by a counter
        self._clock = 0
        self._is_closed = False

    @contextlib.contextmanager
    def take(self, holder: str, size: int) -> Iterator[WorkerOfMany]:
        """Wait for a process for a call with this many bytes. Raises Busy after `close`."""
        call = WaitingCall(holder, time.monotonic() + size / RATE)
        with self._changed:
            self._waiting.append(call)
            self._changed.wait_for(lambda: self._is_closed or (self._free and self._next() is call))
            self._waiting.remove(call)
            if self._is_closed:
                raise Busy("the server is shutting down")
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
        """Stop all waiting calls."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _next(self) -> WaitingCall | None:
        able = (call for call in self._waiting if call.holder not in self._working)
        return min(able, key=lambda one: (self._served.get(one.holder, 0), one.due), default=None)


@dataclass(frozen=True, eq=False)
class WaitingCall:
    """A waiting call. Among the calls of one client, the one that is `due` first goes first."""

    holder: str
    due: float


class WorkerProcess(Worker):
    """Works in processes of low priority. A process that is lost is started again.

    Args:
        fork: whether the processes begin as copies that share the memory of this process, where
            the system supports this. There must be no other threads yet, and no open sockets or
            pipes, which a copy would keep open.
        processes: number of processes. With two, a client whose bodies take long to refuse cannot
            keep others waiting.
    """

    def __init__(self, *, fork: bool = False, processes: int = PROCESSES) -> None:
        super().__init__()
        method = "fork" if fork and sys.platform == "linux" else "spawn"
        self._processes: list[WorkerOfMany] = []
        for _ in range(processes):
            self._processes.append(WorkerOfMany(method, [one.pipe for one in self._processes]))
        self._queue = CallQueue(self._processes)

    def open(self, given: Any) -> None:
        """Set the first argument of functions."""
        super().open(given)
        for process in self._processes:
            process.opened = given
            _value_of(process.ask(_Message((_keep, (given,)))))

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function. Raises Busy if the process is lost or the server is shutting down, and
        WeirError if the call takes too long.

        A bytearray is sent unchanged, and emptied as soon as it is sent, because a large body must
        not stay here while a process works on it.
        """
        consumed = [each for each in given if isinstance(each, bytearray)]
        given = tuple(pickle.PickleBuffer(o) if isinstance(o, bytearray) else o for o in given)
        message = _Message((function, given))
        del given
        with self._queue.take(holder_of_call.get(), message.size) as process:
            answer = process.ask(message, consumed)
        return _value_of(answer)

    def split(self, function: Callable[..., Any], *given: Any) -> tuple[Any, Handle]:
        """Call a function that returns something small and something large. The large part is
        held.
        """
        small, data = self.call(_pack_second, function, *given)
        return small, _Packed(self, data)

    def vet(self, function: Callable[..., Any], *given: Any) -> None:
        """Call a function only for its exceptions."""
        self.call(function, *given)

    def hold(self, value: Any) -> Handle:
        """Hold a value as bytes, which are unpacked only where the value is used."""
        return _Packed(self, pickle.dumps(value, 5))

    def close(self) -> None:
        """End the processes."""
        self._queue.close()
        # All are killed before the first is waited for: on a busy machine, a process of low
        # priority takes a second to end.
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.close()


class WorkerOfMany:
    """One process, and the pipe to it.

    Args:
        method: start method: "fork" or "spawn".
        inherited: pipes of this process that a copy of it must close.

    Attributes:
        opened: the value that a restarted process is opened with.
        pipe: this process's end of the pipe.
    """

    def __init__(self, method: str, inherited: Sequence[Connection] = ()) -> None:
        self.opened: Any = None
        self._lock = threading.Lock()
        self._start(method, inherited)

    def ask(self, message: _Message, consumed: Sequence[bytearray] = ()) -> tuple[bool, Any]:
        """Make a call. Returns whether it succeeded, and its result or exception.

        Bytearrays in `consumed` are emptied as soon as the message is sent.
        """
        with self._lock:
            try:
                if not self._process.is_alive():
                    self._restart()
                message.send(self.pipe)
                _drop(consumed)
                if not self.pipe.poll(SECONDS):
                    self._kill()
                    raise WeirError("the request takes too long to process. Send less at once.")
                answer: tuple[bool, Any] = _read(_receive(self.pipe))
            except (EOFError, OSError):
                self._kill()
                LOG.error("a worker process was lost, and is started again")
                raise Busy(
                    "the process that handles large requests was lost. Send the request again."
                ) from None
        return answer

    def close(self) -> None:
        """End the process."""
        self._kill()
        self.pipe.close()

    def kill(self) -> None:
        """Kill the process without waiting for its end."""
        self._process.kill()

    def _kill(self) -> None:
        self.kill()
        self._process.join()

    def _start(self, method: str, inherited: Sequence[Connection] = ()) -> None:
        context = multiprocessing.get_context(method)
        self.pipe, theirs = context.Pipe()
        target: Any = context  # `Process` depends on the start method
        copied = [*inherited, self.pipe] if method == "fork" else []
        self._process = target.Process(
            target=_serve, args=(theirs, copied), name="weir-worker", daemon=True
        )
        self._process.start()
        theirs.close()

    def _restart(self) -> None:
        """Start the process again, but not as a copy, because the server has threads by now."""
        self.pipe.close()
        self._start("spawn")
        _Message((_keep, (self.opened,))).send(self.pipe)
        _receive(self.pipe)


class _Packed(Handle):
    """A value that is held here as bytes, and unpacked only where it is used.

    Args:
        steps: functions, with their further arguments, that are applied to the value one after
            another wherever it is unpacked.
    """

    _worker: WorkerProcess

    def __init__(self, worker: WorkerProcess, value: Any, steps: tuple[_Step, ...] = ()) -> None:
        super().__init__(worker, value)
        self._steps = steps

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how the other process unpickles this: as the value itself.

        The bytes are sent there unchanged, and dropped there as soon as they are read.
        """
        return _unpack, (pickle.PickleBuffer(self._value), self._steps)

    def get(self) -> Any:
        return _unpack(self._value, self._steps, self._worker.opened)

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        return self._worker.call(function, self, *given)

    def map(self, function: Callable[..., Any], *given: Any) -> Handle:
        return _Packed(self._worker, self._value, (*self._steps, (function, given)))


class _Message:
    """A message to the other process. Its buffers are not copied."""

    def __init__(self, value: Any) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        self._data = pickle.dumps(value, 5, buffer_callback=self._buffers.append)

    @property
    def size(self) -> int:
        """The size in bytes of a message that has not been sent yet."""
        return len(self._data) + sum(buffer.raw().nbytes for buffer in self._buffers)

    def send(self, pipe: Connection) -> None:
        """Send the message, and release its buffers."""
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

    glibc stops doing so for buffers of up to 32 MB once one of that size has been freed, as happens
    while a model is loaded. The buffers of a body would then stay in this process.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # only glibc has it
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, PIECE)


def _receive(pipe: Connection) -> list[bytearray]:
    """Receive the parts of a message from the other process: its content and its buffers."""
    return [_receive_bytes(pipe, size) for size in pickle.loads(pipe.recv_bytes())]


def _read(parts: list[bytearray]) -> Any:
    """Read the content of a message, and empty the list of its parts."""
    data, *buffers = parts
    parts.clear()
    return pickle.loads(data, buffers=buffers)


def _receive_bytes(pipe: Connection, size: int) -> bytearray:
    """Receive this many bytes, without copying more than one piece."""
    received = bytearray(size)
    with memoryview(received) as view:
        for at in range(0, size, PIECE):
            pipe.recv_bytes_into(view[at : at + PIECE])
    return received


def _unpack(data: Any, steps: tuple[_Step, ...], *opened: Any) -> Any:
    """Return the value of a handle."""
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
    # A terminal sends SIGINT to all processes, but answers must finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(NICE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a copied process has no threads
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
    except Exception:  # some exceptions contain values that cannot be pickled
        return _Message((False, (RuntimeError, (f"{type(error).__name__}: {error}",), {})))


def _restored(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """Return the exception of another process. Its constructor may need other arguments."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def _value_of(answer: tuple[bool, Any]) -> Any:
    """Return the result of a call, or raise its exception."""
    good, value = answer
    if good:
        return value
    raise _restored(*value)
