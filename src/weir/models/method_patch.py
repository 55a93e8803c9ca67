"""Replacement of a method on one module object, not on copies of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


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
