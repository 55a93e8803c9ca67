"""Work on what clients send, apart from the thread that answers: in a process where it is large.

One interpreter runs one thread at a time. Were large bodies parsed, rendered and tokenized beside
the engine, each of its steps would wait for them hundreds of times. Functions that are called here
take first what the worker was opened with. Knows nothing about HTTP, prompts or rows.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
"""By how much the process gives way to the one that answers."""


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
        """Hold what a function makes of the value."""
        return Handle(self._worker, self.call(function, *given))


class WorkerProcess(Worker):
    """Works in a process of its own, of low priority, which is started again if it is lost.

    Args:
        fork: share this process' memory. There must be no other threads yet, nor open files that
            others wait for.
    """

    def __init__(self, *, fork: bool = False) -> None:
        super().__init__()
        # A lock would go to whom it likes, and somebody might wait for a minute.
        self._turns = ThreadPoolExecutor(1, "weir-worker")
        self._start("fork" if fork and sys.platform == "linux" else "spawn")

    def open(self, given: Any) -> None:
        """Say what functions get before what they are called with."""
        super().open(given)
        self.call(_keep, given)

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        """Call a function; Busy if the process is lost meanwhile, WeirError if it takes too long.

        A bytearray is not copied.
        """
        given = tuple(pickle.PickleBuffer(o) if isinstance(o, bytearray) else o for o in given)
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps((function, given), 5, buffer_callback=buffers.append)
        good, value = self._turns.submit(self._ask, data, buffers).result()
        if good:
            return value
        raise _restored(*value)

    def _ask(self, data: bytes, buffers: list[pickle.PickleBuffer]) -> tuple[bool, Any]:
        """Whether a call was good, and what it returned or raised."""
        try:
            if not self._process.is_alive():
                self._restart()
            _send(self._pipe, data, buffers)
            if not self._pipe.poll(SECONDS):
                self._kill()
                raise WeirError("this takes too long to read; send less at once")
            answer: tuple[bool, Any] = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._kill()
            LOG.error("the worker process is lost, and is started again")
            raise Busy("the process that reads large requests was lost") from None
        return answer

    def split(self, function: Callable[..., Any], *given: Any) -> tuple[Any, Handle]:
        """Call a function that makes something small and something large, which is held."""
        small, data = self.call(_pack_second, function, *given)
        return small, _Packed(self, data)

    def vet(self, function: Callable[..., Any], *given: Any) -> None:
        """Call a function for what it raises."""
        self.call(function, *given)

    def hold(self, value: Any) -> Handle:
        """Hold a value as bytes that only the process reads."""
        return _Packed(self, pickle.dumps(value, 5))

    def close(self) -> None:
        """End the process."""
        self._turns.shutdown(wait=False, cancel_futures=True)
        self._kill()
        self._pipe.close()

    def _kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _start(self, method: str) -> None:
        context = multiprocessing.get_context(method)
        self._pipe, theirs = context.Pipe()
        target: Any = context  # its `Process` is one of the method's
        inherited = self._pipe if method == "fork" else None
        self._process = target.Process(
            target=_serve, args=(theirs, inherited), name="weir-worker", daemon=True
        )
        self._process.start()
        theirs.close()

    def _restart(self) -> None:
        """Start the process anew: this one has threads by now, and cannot be copied."""
        self._pipe.close()
        self._start("spawn")
        _send(self._pipe, pickle.dumps((_keep, (self._opened,))), [])
        self._pipe.recv_bytes()


class _Packed(Handle):
    """A value that a process holds as bytes."""

    _worker: WorkerProcess

    def get(self) -> Any:
        return pickle.loads(self._value)

    def call(self, function: Callable[..., Any], *given: Any) -> Any:
        return self._worker.call(_call, pickle.PickleBuffer(self._value), function, *given)

    def map(self, function: Callable[..., Any], *given: Any) -> Handle:
        data = pickle.PickleBuffer(self._value)
        return _Packed(self._worker, self._worker.call(_map, data, function, *given))


# --- in the process


def _pack_second(opened: Any, function: Callable[..., Any], *given: Any) -> tuple[Any, bytes]:
    small, large = function(opened, *given)
    return small, pickle.dumps(large, 5)


def _map(opened: Any, data: Any, function: Callable[..., Any], *given: Any) -> bytes:
    return pickle.dumps(function(opened, pickle.loads(data), *given), 5)


def _call(opened: Any, data: Any, function: Callable[..., Any], *given: Any) -> Any:
    return function(opened, pickle.loads(data), *given)


_KEPT: list[Any] = [None]


def _keep(_: Any, given: Any) -> None:
    _KEPT[0] = given


def _serve(pipe: Connection, inherited: Connection | None) -> None:
    """Answer calls until the other end is closed."""
    if inherited is not None:
        inherited.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's goes to all; answers are to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(NICE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of a copied process are not there
    torch.set_num_threads(1)
    gc.freeze()
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(_answer(pipe))


def _answer(pipe: Connection) -> bytes:
    data, buffers = pipe.recv_bytes(), list(_received(pipe))
    try:
        function, given = pickle.loads(data, buffers=buffers)
        buffers.clear()
        return pickle.dumps((True, function(_KEPT[0], *given)), 5)
    except Exception as error:
        return _failure(error)


def _failure(error: Exception) -> bytes:
    try:
        return pickle.dumps((False, (type(error), error.args, error.__dict__)), 5)
    except Exception:  # some hold what cannot be pickled
        return pickle.dumps((False, (RuntimeError, (f"{type(error).__name__}: {error}",), {})), 5)


def _restored(kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    """The exception of another process; its own constructor may want other arguments."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


def _send(pipe: Connection, data: bytes, buffers: list[pickle.PickleBuffer]) -> None:
    pipe.send_bytes(data)
    pipe.send_bytes(len(buffers).to_bytes(4, "little"))
    for buffer in buffers:
        pipe.send_bytes(buffer.raw())


def _received(pipe: Connection) -> Iterator[bytes]:
    for _ in range(int.from_bytes(pipe.recv_bytes(), "little")):
        yield pipe.recv_bytes()
