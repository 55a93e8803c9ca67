"""Replacement of a method on one module object, which copies of the module do not have.

The patch lies in the module's `__dict__`, which is copied and pickled with the module. A copy must
not lead back to the patch: it has the method of its class. Knows nothing about weir.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


class MethodPatch:
    """Call `around(own, *args, **kwargs)` in place of a module's method.

    Attributes:
        own: the method as it was.
    """

    def __init__(self, module: nn.Module, name: str, around: Callable[..., Any]) -> None:
        self._module, self._name = module, name
        self.own: Callable[..., Any] = getattr(module, name)
        self.put(around)

    def put(self, around: Callable[..., Any]) -> None:
        """Put the patch on the module, or put it back after it was removed."""
        own: Callable[..., Any] = getattr(self._module, self._name)
        if own != self.own:  # else the same object, for which a program may have been made
            self.own = own
        self._around: Callable[..., Any] | None = around
        self._before = vars(self._module).get(self._name)
        functools.update_wrapper(self, self.own, updated=())
        vars(self._module)[self._name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `around` with the method."""
        around = self._around  # another thread may remove it
        if around is None:
            return self.own(*args, **kwargs)
        return around(self.own, *args, **kwargs)

    def __reduce__(self) -> Any:
        """In a copy or a pickle of the module: the method as it was, of the copy.

        That of its class, or what another library had put in its place; to be read without weir.
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
