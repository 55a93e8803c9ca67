"""Background writer of turns, with a bounded queue.

`submit` waits while the queue is full, so that the engine cannot run far ahead of the disk. Knows
nothing about files.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from weir.errors import WeirError
from weir.serve.sessions.records import Checkpoint, OnSaved, TurnRecord

_log = logging.getLogger(__name__)
_Job = tuple[Checkpoint, TurnRecord, OnSaved]


class BackgroundWriter:
    """A thread that writes turns in the order they come.

    Args:
        queue: maximum number of waiting turns, including the one being written.
    """

    def __init__(self, write: Callable[[Checkpoint, TurnRecord], None], queue: int) -> None:
        if queue < 1:
            raise WeirError(f"one turn or more may wait to be written, not {queue}")
        self._write = write
        self._queue = queue
        self._jobs: list[_Job] = []  # the first is being written
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weir-store", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: Checkpoint, record: TurnRecord, done: OnSaved) -> None:
        """Queue a turn for writing; waits while the queue is full."""
        with self._changed:
            while len(self._jobs) >= self._queue and not self._closed:
                self._changed.wait()
            closed = self._closed
            if not closed:
                self._jobs.append((checkpoint, record, done))
                self._changed.notify_all()
        if closed:
            done(WeirError("the store is closed, and keeps nothing more"))

    def close(self) -> None:
        """Accept no more turns, and wait until the accepted ones are written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                checkpoint, record, done = job
                error: Exception | None = None
                try:
                    self._write(checkpoint, record)
                except Exception as caught:
                    error = caught
                with self._changed:
                    del self._jobs[0]
                    self._changed.notify_all()
                try:
                    done(error)
                except Exception:
                    _log.exception("the callback of a saved turn has failed")
        finally:
            # Whatever ends this thread, no caller may wait forever.
            with self._changed:
                self._closed = True
                self._changed.notify_all()

    def _next(self) -> _Job | None:
        with self._changed:
            while not self._jobs and not self._closed:
                self._changed.wait()
            return self._jobs[0] if self._jobs else None
