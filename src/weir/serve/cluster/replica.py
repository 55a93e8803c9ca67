"""One server of a cluster: `weir serve` in a separate process, with a store that replicas share.

`ReplicaProcess` starts the process, which runs `main`. The settings come on standard input, which
stays open as long as the starter lives. The port is written to standard output. This file does not
use Ray.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weir.errors import WeirError
from weir.serve.limits import Limits

START = "from weir.serve.cluster.replica import main; main()"
LINES = 5
"""Number of last lines of a failed process that its error repeats."""


@dataclass(frozen=True)
class Settings:
    """The settings of every replica. Attributes that are not listed are options of `weir serve`.

    Attributes:
        place: the storage that all replicas share, for `open_storage`.
        name: the name of the model in the API.
        most: the most checkpoints that a replica keeps in memory.
        keys: SHA-256 hashes of the API keys.
        threads: number of CPU threads for PyTorch; None for PyTorch's default.
        loading: arguments of `load`.
        secret: the secret by which a replica recognizes the front, which forwards requests to it
            (`api/front.py`).
        host: address at which a replica listens; the front must be able to reach it.
    """

    model: str
    policy: str
    chunk: int
    rows: int
    place: str
    name: str
    most: int = 256
    keys: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    deterministic: bool = False
    threads: int | None = None
    loading: dict[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    notes_changes: bool = False
    secret: str = ""
    host: str = "127.0.0.1"

    def book(self, number: int) -> Path | None:
        """Return the file of a replica's responses and conversations. None if `place` is not a
        folder.
        """
        scheme, found, rest = self.place.partition("://")
        if found and scheme != "file":
            return None
        return Path(rest if found else self.place) / "books" / f"{number}.db"


class ReplicaProcess:
    """The process of a replica, which is started again when it has ended.

    Args:
        number: the number of this replica. A process with the same number has the same responses if
            they are in a file (`Settings.book`).
    """

    def __init__(self, settings: Settings, number: int) -> None:
        self._given = base64.b64encode(pickle.dumps((settings, number))) + b"\n"
        self._host = settings.host
        self._lock = threading.Lock()
        self._ending = False
        self._process: subprocess.Popen[bytes] | None = None

    def locate(self, *, failed: bool = False) -> tuple[str, int]:
        """Return the address of the process once it serves. A `failed` process is replaced."""
        with self._lock:
            process = self._process
            if process is not None and failed and not self._ending:
                process.kill()
                process.wait()
            if process is None or process.poll() is not None:
                if self._ending:
                    raise WeirError("the server is shutting down")
                self._start()
            return self._host, self._port

    def _start(self) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-c", START]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        last: deque[bytes] = deque(maxlen=LINES)
        copying = threading.Thread(
            target=_copy_lines, args=(self._process.stderr, last), daemon=True
        )
        copying.start()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(self._given)
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            copying.join(1)
            said = " ".join(b" ".join(last).decode("utf-8", "replace").split())
            raise WeirError(f"a replica does not start: {said or 'it printed nothing'}")
        self._port = int(json.loads(line)["port"])

    def drain(self) -> None:
        """Let the process finish its answers and then exit."""
        self._ending = True
        if self._process is not None:
            self._process.terminate()

    def wait(self, seconds: float) -> None:
        """Wait for the end of the process, and kill it if it takes longer."""
        if self._process is None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _copy_lines(lines: Any, last: deque[bytes]) -> None:
    for line in lines:
        last.append(line)
        sys.stderr.buffer.write(line)
        sys.stderr.flush()


def main() -> None:
    """Serve as a replica until SIGTERM, or until the starter has ended."""
    settings, number = pickle.loads(base64.b64decode(sys.stdin.buffer.readline()))
    from weir.serve.worker import WorkerProcess

    worker = WorkerProcess(fork=True)  # copied before there are threads
    try:
        _serve(settings, number, worker)
    except WeirError as error:
        sys.exit(str(error))
    finally:
        worker.close()


def _serve(settings: Settings, number: int, worker: Any) -> None:
    import torch

    from weir.loading import load
    from weir.native import choose_products, compile_steps
    from weir.serve import Engine, EngineClient, ResponseStore
    from weir.serve.api import Keys, log_event, log_json, make_app, run_app
    from weir.serve.api.front import FrontConnection, OnlyFront, listen_for_front
    from weir.serve.cluster.shared_turns import SharedTurns
    from weir.serve.cluster.storage import open_storage
    from weir.serve.sessions.store import SessionStore
    from weir.serve.sessions.store_format import StoreFormat

    threading.Thread(target=_end_with_starter, daemon=True).start()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    log_json()
    limits = settings.limits
    model, tokenizer = load(settings.model, **settings.loading)
    if settings.deterministic:
        choose_products(model)
    else:
        compile_steps(model, torch_compile=False, strict=True)
    store_format = StoreFormat.of(model, settings.policy, settings.chunk)
    storage = open_storage(settings.place)
    store = SessionStore(SharedTurns(storage, store_format, most=settings.most))
    book = settings.book(number)
    if book is not None:
        book.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    responses = ResponseStore(book, limits.texts)
    engine = Engine(
        model,
        settings.policy,
        settings.rows,
        store,
        chunk=settings.chunk,
        queue=limits.queue,
        shared=len(settings.keys) > 1,
        deterministic=settings.deterministic,
    )
    engine.warm_up()
    steps = engine.cache.steps
    log_event("decode steps", run=steps["run"], reason=steps["reason"])
    client = EngineClient(
        engine,
        tokenizer,
        settings.name,
        limits,
        responses,
        worker=worker,
        is_replica=True,
        aliases=settings.aliases,
        notes_changes=settings.notes_changes,
    )
    keys = Keys(settings.keys)
    app = OnlyFront(make_app(client, keys, settings.hosts, settings.origins), settings.secret)
    bound = listen_for_front(settings.host)
    sys.stdout.write(json.dumps({"port": bound.getsockname()[1]}) + "\n")
    sys.stdout.flush()
    run_app(app, bound, limits, lambda: client.drain(limits.drain), FrontConnection)
    responses.close()
    store.close()


def _end_with_starter() -> None:
    """End this process when its starter has ended, because nothing else would."""
    sys.stdin.buffer.read()
    os._exit(1)
