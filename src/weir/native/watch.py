"""Notices when modules of a decoder have changed since its form was read.

The check runs before every step. After a step, nothing that the check reads is left in the
processor's caches, so checking 30 layers takes half a millisecond. Therefore only the inputs of a
layer's computation are checked: weights and their memory, modules, numbers, and the method
`forward`. Hooks are checked only if any were registered in this process since the last check.
Classes, and the functions that their methods use from their files and from libraries
(`torch.nn.functional.silu`), are checked once each, not once for each layer.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils.hooks import RemovableHandle

from weir.models import has_hooks

_READ = {"training", "numbers", "scales", "residual_multiplier", "embedding_multiplier"}
_READ |= {"layer_idx"}
"""Attributes of modules that are watched, in addition to parameters, buffers, modules, functions
and floats.
"""
_OF_EMBEDDINGS = {"max_norm", "embed_scale"}
"""Attributes of embeddings that are watched, whether they exist or not."""


class Watch:
    """Records everything that a module's forward, and some modules below it, depend on.

    Args:
        owner: the module; of its class's methods, only `forward` and `__call__` are watched.
        parts: the modules below it, each with all of its submodules; entries that are not modules
            are ignored.
        hooked: further modules whose hooks are watched.
    """

    def __init__(self, owner: Any, parts: Iterable[Any], hooked: Iterable[nn.Module] = ()) -> None:
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._hooks: list[dict[Any, Any]] = [
            torch_modules._global_forward_hooks,
            torch_modules._global_forward_pre_hooks,
        ]
        self._handles = -1  # number of registered hooks at the last check
        weights: list[Any] = []
        modules = [owner]
        for part in parts:
            modules += part.modules() if isinstance(part, nn.Module) else ()
        for module in modules:
            own = vars(module)
            for held in (module._modules, module._parameters, module._buffers):
                self._dicts += [held] * len(held)
                self._names += held
            names = {"forward", *filter(own.__contains__, _READ)}
            names |= {name for name, value in own.items() if _decides(value)}
            if isinstance(module, nn.Embedding):
                names |= _OF_EMBEDDINGS
            self._dicts += [own] * len(names)
            self._names += names
            weights += [*module.parameters(recurse=False), getattr(module, "numbers", None)]
        for module in (*modules[1:], *hooked):
            self._hooks += [module._forward_hooks, module._forward_pre_hooks]
        self._modules, self._types = modules, list(map(type, modules))
        # A weight that torchao has packed has no memory address.
        self._weights = [t for t in weights if t is not None and type(t.data) is Tensor]
        self._read: set[tuple[int, str]] = set()
        self._classes: list[type] = []
        self._methods: list[str] = []
        for kind in dict.fromkeys(map(type, modules[1:])):
            for name in _methods_of(kind):
                self._classes.append(kind)
                self._methods.append(name)
                self._watch_names(getattr(kind, name))
        for name in ("forward", "__call__"):
            self._classes.append(type(owner))
            self._methods.append(name)
        self._watch_names(type(owner).forward)
        self._watch_settings(owner)
        held, memory, functions = self._look()
        self._held, self._memory = list(held), list(memory)
        self._functions = list(functions)

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        # Compare by identity, because the comparison of two tensors has no truth value.
        held, memory, functions = self._look()
        if not all(map(operator.is_, held, self._held)) or list(memory) != self._memory:
            return False
        if not all(map(operator.is_, functions, self._functions)):
            return False
        if not all(map(operator.is_, map(type, self._modules), self._types)):
            return False
        handles = RemovableHandle.next_id
        if handles != self._handles:
            if has_hooks(*self._hooks):
                return False
            self._handles = handles
        return True

    def _look(self) -> tuple[Iterator[Any], Iterator[int], Iterator[Any]]:
        """Return the current attributes, the addresses of weights, and functions. Each is looked up
        when it is read, so that a check fetches it into the processor's caches once.
        """
        held = map(dict.get, self._dicts, self._names)
        functions = map(getattr, self._classes, self._methods)
        return held, map(Tensor.data_ptr, self._weights), functions

    def _watch_settings(self, owner: nn.Module) -> None:
        """Watch the settings of the configuration that the owner's forward may read: all names in
        its code.
        """
        settings = vars(owner.config) if hasattr(owner, "config") else {}
        function: Any = inspect.unwrap(type(owner).forward)
        read = [name for name in function.__code__.co_names if name in settings]
        self._dicts += [settings] * len(read)
        self._names += read

    def _watch_names(self, method: Callable[..., Any]) -> None:
        """Watch the functions that a method uses, and those that functions of its file use.

        A method refers to functions of its file by their names, and to those of libraries by a
        module's name and an attribute (`nn.functional.silu`). The bytecode has all these names in
        one list, so each is looked up in each module that the method can reach.
        """
        todo, seen = [method], set[Any]()
        while todo:
            function = inspect.unwrap(todo.pop())
            if not isinstance(function, FunctionType) or function in seen:
                continue
            seen.add(function)
            for names, name in _reads(function):
                if (id(names), name) not in self._read:
                    self._read.add((id(names), name))
                    self._dicts.append(names)
                    self._names.append(name)
                named = names[name]
                of_its_file = getattr(named, "__module__", None) == function.__module__
                if names is function.__globals__ and of_its_file:
                    todo.append(named)


def _reads(function: FunctionType) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each function that a function's code uses, as the dictionary of a module and a name in
    it.
    """
    names, reached = function.__code__.co_names, [function.__globals__]
    for held in reached:  # modules that it uses are added during the loop
        for name in names:
            named = held.get(name)
            if isinstance(named, ModuleType):
                if not any(each is vars(named) for each in reached):
                    reached.append(vars(named))
            elif callable(named):
                yield held, name


def _decides(value: Any) -> bool:
    """Return whether an attribute may be a number or function that a forward uses."""
    return type(value) is float or (callable(value) and not isinstance(value, nn.Module | type))


def _methods_of(kind: type) -> Iterator[str]:
    """Yield "forward", "__call__", and the names of a class's other methods, except PyTorch's and
    special methods.
    """
    yield "forward"
    yield "__call__"
    for part in kind.__mro__:
        if part.__module__.startswith("torch."):
            continue
        for name, value in vars(part).items():
            if isinstance(value, FunctionType) and not name.startswith("__") and name != "forward":
                yield name
