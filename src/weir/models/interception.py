"""Interception of a model's calls: a method replaced on one module, and a lock around forwards.

A patch is on one module object, not on copies of it. Under the lock no other thread sees what a
call switches; models made from one configuration object switch attention together, so they share
one lock.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
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


class MethodPatch:
    """Call `around(own, *args, **kwargs)` in place of a module's method, which stays as `own`."""

    def __init__(self, module: nn.Module, name: str, around: Callable[..., Any]) -> None:
        self._module, self._name = module, name
        self.own: Callable[..., Any] = getattr(module, name)
        self.put(around)

    def put(self, around: Callable[..., Any]) -> None:
        """Put the patch on the module, or put it back after it was removed."""
        own: Callable[..., Any] = getattr(self._module, self._name)
        if own != self.own:  # otherwise keep the object: a program may be compiled for it
            self.own = own
        self._around: Callable[..., Any] | None = around
        self._before = vars(self._module).get(self._name)
        functools.update_wrapper(self, self.own, updated=())
        vars(self._module)[self._name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `around` with the original method."""
        around = self._around  # another thread may remove it
        if around is None:
            return self.own(*args, **kwargs)
        return around(self.own, *args, **kwargs)

    def __reduce__(self) -> Any:
        """Restore the class's method, or another library's replacement of it, in a copy or a
        pickle.
        """
        if self._before is None:
            return getattr, (self._module, self._name)
        return functools.partial, (self._before,)

    def remove(self) -> None:
        """Restore the module's method; a patch that another library has put there since stays."""
        self._around = None
        if vars(self._module).get(self._name) is not self:
            return
        if self._before is None:
            del vars(self._module)[self._name]
        else:
            vars(self._module)[self._name] = self._before


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
