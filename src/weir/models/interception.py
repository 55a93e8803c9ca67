"""Interception of a model's calls: a method replaced on one module, and a lock around forwards.

A patch is on one module object, not on copies of it. Under the lock, one call at a time switches
the attention of a configuration. Models that were made from the same configuration object share it,
so they share one lock. A call that began before the model was patched does not hold the lock, and
continues with the attention that it had. To recognize such calls, weir records which thread has
switched the attention.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

from torch import nn

_LOCKS: weakref.WeakValueDictionary[int, ForwardLock] = weakref.WeakValueDictionary()
"""Locks by the id of their configuration. A lock keeps its configuration alive."""

CAPTURING = "transformers.utils.output_capturing"
"""The file of transformers' hooks that collect attentions and hidden states."""
_MAKING = threading.RLock()
"""Reentrant, because the garbage collector may run in a thread that holds the lock."""


def has_hooks(*held: Mapping[Any, Any]) -> bool:
    """Return whether a module has any forward hook that is not from transformers.

    transformers puts hooks on a model when it is first asked for attentions or hidden states, and
    leaves them there. They do nothing in a call that asks for neither.

    Args:
        held: hooks by number, such as a module's `_forward_hooks`.
    """
    return any(
        getattr(hook, "__module__", None) != CAPTURING for hooks in held for hook in hooks.values()
    )


def has_class_forward(module: nn.Module, *, patched: bool = False) -> bool:
    """Return whether a module has the forward of its class.

    A copy of a patched module (`MethodPatch`) holds its class's forward as an attribute.

    Args:
        module: any module.
        patched: also look below weir's own patches, which compute the same: faster products, a
            layer's compiled program, a cache's hooks.
    """
    put = vars(module).get("forward")
    while patched and isinstance(put, MethodPatch):
        put = put.own
    return put is None or getattr(put, "__func__", None) is type(module).forward


class MethodPatch:
    """Calls `around(own, *args, **kwargs)` instead of a module's method, which is kept as `own`."""

    def __init__(self, module: nn.Module, name: str, around: Callable[..., Any]) -> None:
        self._module, self._name = module, name
        self.own: Callable[..., Any] = getattr(module, name)
        self.put(around)

    def put(self, around: Callable[..., Any]) -> None:
        """Put the patch on the module, or put it back after it was removed."""
        own: Callable[..., Any] = getattr(self._module, self._name)
        if own != self.own:  # otherwise keep the object, which may have a compiled program
            self.own = own
        self._around: Callable[..., Any] | None = around
        self._before = vars(self._module).get(self._name)
        self._function = getattr(type(self._module), self._name, None)
        functools.update_wrapper(self, self.own, updated=())
        vars(self._module)[self._name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `around` with the original method."""
        function = getattr(type(self._module), self._name, None)
        if function is not self._function:  # the module's class was replaced, or the class's method
            self._function = function
            if self._before is None:
                self.own = MethodType(cast(Any, function), self._module)
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
        """Restore the module's method. A patch that another library has put over this one
        stays.
        """
        self._around = None
        if vars(self._module).get(self._name) is not self:
            return
        if self._before is None:
            del vars(self._module)[self._name]
        else:
            vars(self._module)[self._name] = self._before


class ForwardLock:
    """Reentrant lock around calls of one configuration's models, which also switches their
    attention.

    A configuration has the same lock as long as anything refers to that lock, for example a thread
    that waits for it. `_LOCKS` refers to locks weakly, which `threading.RLock` does not allow.
    """

    def __init__(self, config: Any) -> None:
        self._lock = threading.RLock()
        self._config = config
        self._switcher: int | None = None
        self._plain: str | None = None

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    @contextmanager
    def attention(self, name: str | None) -> Iterator[None]:
        """Switch the configuration's attention implementation, for the thread with the lock; None
        leaves it as it is.
        """
        before, outer = self._config._attn_implementation, self._switcher
        if outer is None:
            self._switcher, self._plain = threading.get_ident(), before
        self._set(name or before)
        try:
            yield
        finally:
            self._set(before)
            self._switcher = outer

    def is_switched_here(self) -> bool:
        """Return whether the calling thread has switched the attention."""
        return self._switcher == threading.get_ident()

    def plain_attention(self) -> str | None:
        """Return the attention that a call without the lock had before another thread switched it;
        None if the calling thread has switched it, or no thread has.

        The name is kept after that thread has switched back, because the call may have read weir's
        name just before.
        """
        return None if self.is_switched_here() else self._plain

    def _set(self, name: str | None) -> None:
        held = vars(self._config)
        if _NAME in held:  # as below, but without walking through nested configurations
            held[_NAME] = name
        else:
            # A plain string would also be set in nested configurations (MPT has one).
            self._config._attn_implementation = {"": name}


_NAME = "_attn_implementation_internal"
"""The attribute of transformers' configurations that holds the attention's name."""


def forward_lock_of(config: Any) -> ForwardLock:
    """Return the lock of a configuration's models: the same as long as anything refers to it."""
    with _MAKING:
        found = _LOCKS.get(id(config))
        if found is None:
            found = _LOCKS[id(config)] = ForwardLock(config)
        return found


def plain_attention_of(config: Any) -> str | None:
    """Return `ForwardLock.plain_attention` of a configuration; None if it has no lock."""
    with _MAKING:
        held = _LOCKS.get(id(config))
    return None if held is None else held.plain_attention()
