"""A method put in front of a module's own, on one object, so that copies have their own.

What is put on a module lies in its `__dict__`, and goes along when the module is copied or pickled.
There it must not lead back here: a copy has the method of its class. Knows nothing about weir.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


class MethodPatch:
    """Calls `around(own, *args, **kwargs)` where a module's method was called.

    Attributes:
        own: the method as it was.
    """

    def __init__(self, module: nn.Module, name: str, around: Callable[..., Any]) -> None:
        self._module, self._name = module, name
        self.own: Callable[..., Any] = getattr(module, name)
        self.put(around)

    def put(self, around: Callable[..., Any]) -> None:
        """Put `around` in front of the method; once more after it was removed."""
        own: Callable[..., Any] = getattr(self._module, self._name)
        if own != self.own:  # else the same object, for which a program may have been made
            self.own = own
        self._around: Callable[..., Any] | None = around
        self._before = vars(self._module).get(self._name)
        functools.update_wrapper(self, self.own, updated=())
        vars(self._module)[self._name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the method, with `around` in front."""
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
        """Give the module back what it had; what another library put there since stays."""
        self._around = None
        if vars(self._module).get(self._name) is not self:
            return
        if self._before is None:
            del vars(self._module)[self._name]
        else:
            vars(self._module)[self._name] = self._before
