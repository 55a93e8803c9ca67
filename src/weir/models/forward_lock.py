"""Lock around a model's forwards: no other thread may see what a call switches.

Models made from one configuration object switch attention together, so they share one lock.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from types import CodeType, FrameType
from typing import Any

from torch import nn

_LOCKS: weakref.WeakValueDictionary[int, ForwardLock] = weakref.WeakValueDictionary()
"""Locks by the id of their configuration, which the lock keeps alive."""

_MAKING = threading.RLock()
"""Reentrant: a thread's garbage may be collected while it holds the lock."""

_CALL = nn.Module._call_impl.__code__

_LOOKING = threading.Lock()
"""Held by the thread that has switched garbage collection off."""


class ForwardLock:
    """Reentrant lock around calls of one configuration's models.

    `threading.RLock` cannot be referenced weakly. A configuration keeps the same lock as long as
    anyone holds this object, and a waiting thread does.
    """

    def __init__(self, config: Any) -> None:
        self._lock = threading.RLock()
        self._config = config

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def forward_lock_of(config: Any) -> ForwardLock:
    """Return the lock of a configuration's models: the same object as long as anyone holds it."""
    with _MAKING:
        found = _LOCKS.get(id(config))
        if found is None:
            found = _LOCKS[id(config)] = ForwardLock(config)
        return found


def wait_for_others(module: nn.Module, taking: CodeType) -> None:
    """Wait for calls of a module that other threads began before it had a lock, which the caller
    holds.

    The stacks of all threads are searched for them; calls inside the function of code `taking`
    wait.
    """
    # Whether a frame calls the module; every frame is read only once (see `_self_of`).
    judged: dict[FrameType, bool] = {}
    while any(
        _calls(frame, module, taking, judged)
        for thread, frame in sys._current_frames().items()
        if thread != threading.get_ident()
    ):
        time.sleep(1e-3)


def _calls(
    frame: FrameType | None, module: nn.Module, taking: CodeType, judged: dict[FrameType, bool]
) -> bool:
    """Return whether a thread with this innermost frame calls the module without the lock."""
    while frame is not None and frame.f_code is not taking:
        if frame.f_code is _CALL and frame not in judged:
            judged[frame] = _self_of(frame) is module
        if judged.get(frame):
            return True
        frame = frame.f_back
    return False


def _self_of(frame: FrameType) -> object:
    """Return the module whose call a frame of another thread is.

    Before Python 3.13, `f_locals` copies the frame's variables into a dictionary that the frame
    keeps. The other thread must not leave the frame meanwhile, or freed memory is copied. So
    nothing may run that lets it continue, as freeing a tensor does: garbage collection is paused,
    and no frame is read twice, which would free the dictionary's old content.
    """
    with _LOOKING:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return frame.f_locals.get("self")
        finally:
            if collecting:
                gc.enable()
