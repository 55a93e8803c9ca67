"""Background writer of turns, with a bounded queue. Knows nothing about files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from weir.errors import WeirError
from weir.serve.sessions.records import Checkpoint, OnSaved, TurnRecord

_log = logging.getLogger(__name__)


class BackgroundWriter:
    """A thread that writes turns in the order they come.

    Args:
        queue: maximum number of waiting turns, including the one being written.
    """

    def __init__(self, write: Callable[[Checkpoint, TurnRecord], None], queue: int) -> None:
        if queue < 1:
            raise WeirError(f"one turn or more may wait to be written, not {queue}")
        self._write = write
        self._room = threading.BoundedSemaphore(queue)
        self._thread = ThreadPoolExecutor(1, "weir-store")

    def submit(self, checkpoint: Checkpoint, record: TurnRecord, done: OnSaved) -> None:
        """Queue a turn; waits while the queue is full, so that no engine runs ahead of the disk."""
        self._room.acquire()
        try:
            self._thread.submit(self._run, checkpoint, record, done)
        except RuntimeError:
            self._room.release()
            done(WeirError("the store is closed, and keeps nothing more"))

    def close(self) -> None:
        """Accept no more turns, and wait until the accepted ones are written."""
        self._thread.shutdown()

    def _run(self, checkpoint: Checkpoint, record: TurnRecord, done: OnSaved) -> None:
        error: Exception | None = None
        try:
            self._write(checkpoint, record)
        except Exception as caught:
            error = caught
        finally:
            self._room.release()
        try:
            done(error)
        except Exception:
            _log.exception("the callback of a saved turn has failed")
