"""Nodes on their way to disk: one thread writes them, and few may wait for it.

Who brings one while as many wait as may waits too, so that an engine is never further ahead of its
disk. Knows nothing about files.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from weir.errors import WeirError
from weir.serve.engine import Checkpoint, OnSaved

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class WriteJob:
    """A node that is being written.

    Attributes:
        name: the node's.
        node: what is to be written.
        done: who is told.
        dropped: nobody wants it any more.
    """

    name: str
    node: Checkpoint
    done: OnSaved
    dropped: bool = False


class CheckpointWriter:
    """A thread that writes nodes in the order they come.

    Args:
        write: writes one, or raises why it cannot.
        most: nodes that may wait, the one that is being written among them.
    """

    def __init__(self, write: Callable[[WriteJob], None], most: int) -> None:
        if most < 1:
            raise WeirError(f"one node or more may wait to be written, not {most}")
        self._write = write
        self._most = most
        self._jobs: list[WriteJob] = []  # the first is being written
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="weir-store", daemon=True)
        self._thread.start()

    def put(self, name: str, node: Checkpoint, done: OnSaved) -> None:
        """Have a node written; waits while as many wait as may."""
        with self._news:
            while len(self._jobs) >= self._most and not self._closed:
                self._news.wait()
            closed = self._closed
            if not closed:
                self._jobs.append(WriteJob(name, node, done))
                self._news.notify_all()
        if closed:
            done(WeirError("the store is closed, and keeps nothing more"))

    def find(self, name: str) -> Checkpoint | None:
        """A node that is not written yet."""
        with self._news:
            found = [job for job in self._jobs if job.name == name and not job.dropped]
            return found[-1].node if found else None

    def drop(self, name: str) -> None:
        """Nobody wants a node of this name any more."""
        with self._news:
            for job in self._jobs:
                job.dropped = job.dropped or job.name == name

    def close(self) -> None:
        """Take no more, and wait until what was taken is written."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                error: Exception | None = None
                try:
                    self._write(job)
                except Exception as caught:
                    error = caught
                with self._news:
                    self._jobs.remove(job)
                    self._news.notify_all()
                try:
                    job.done(error)
                except Exception:
                    _log.exception("who was told that a turn is saved has failed")
        finally:
            # Whatever ends this thread, nobody is to wait for it in vain.
            with self._news:
                self._closed = True
                self._news.notify_all()

    def _next(self) -> WriteJob | None:
        with self._news:
            while not self._jobs and not self._closed:
                self._news.wait()
            return self._jobs[0] if self._jobs else None
