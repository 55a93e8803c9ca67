"""Whose turn it is to call a model: what a call switches, another thread must not see.

Models made from one configuration object switch attention together, so they take turns together.
Knows nothing about caches or attention.
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
"""By the id of a configuration, which they hold on to."""

_MAKING = threading.RLock()
"""By one thread twice where its garbage is collected while it holds it."""

_CALL = nn.Module._call_impl.__code__


_LOOKING = threading.Lock()
"""Held by the thread that has switched garbage collection off."""


class ForwardLock:
    """Whose turn it is to call the models of one configuration: `with lock:` takes it.

    A lock of its own would not do: these turns are the same for all only as long as somebody holds
    them, and who waits for a lock holds no more than that.
    """

    def __init__(self, config: Any) -> None:
        self._lock = threading.RLock()
        self._config = config

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def forward_lock_of(config: Any) -> ForwardLock:
    """The turns of the models of a configuration, the same as long as anybody holds them."""
    with _MAKING:
        found = _LOCKS.get(id(config))
        if found is None:
            found = _LOCKS[id(config)] = ForwardLock(config)
        return found


def wait_for_others(module: nn.Module, taking: CodeType) -> None:
    """Wait for the calls of a module that began in other threads before it was made to take turns.

    They hold no lock, so they are looked for where they are: in the threads' stacks.

    Args:
        module: the module; the turn to call it is the caller's.
        taking: the code of the function that takes turns; a call within it is one that waits.
    """
    # By frame, whether it calls the module: each is looked into once (`_self_of`).
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
    """Whether a thread whose innermost frame this is calls the module, not taking turns."""
    while frame is not None and frame.f_code is not taking:
        if frame.f_code is _CALL:
            if frame not in judged:
                judged[frame] = _self_of(frame) is module
            if judged[frame]:
                return True
        frame = frame.f_back
    return False


def _self_of(frame: FrameType) -> object:
    """The module that a frame of another thread is a call of.

    Before Python 3.13, `f_locals` copies the frame's variables into a dictionary that the frame
    keeps. The other thread must not leave the frame meanwhile, or what is copied is freed memory:
    so nothing may run that lets it go on, as freeing a tensor does. Hence no garbage is collected,
    and nobody asks a frame twice, which would free what the dictionary held before.
    """
    with _LOOKING:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return frame.f_locals.get("self")
        finally:
            if collecting:
                gc.enable()
