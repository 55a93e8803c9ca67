"""Limits for rendering a chat template: steps, processor time, and the size of texts and lists.

A template is a program that comes with a model. A trace counts its steps. The environment in which
transformers compiles templates counts the texts and lists that the program makes. An operation
whose result can be much larger than its operands (`'a' * 10**10`) is also checked before
it runs. This module knows nothing about messages or tokens.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from itertools import chain
from math import inf, prod
from types import FrameType, MappingProxyType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

MAX_STEPS = 10_000_000
"""Largest number of lines of a compiled template, and of calls, in one rendering; a message takes a
few.
"""
MAX_SECONDS = 10.0
"""Largest processor time of a rendering, in seconds."""
REST = 0.001
"""Pause after each thousand steps, in seconds, so that other threads can use the interpreter."""
SLOW_SECONDS = 0.05
"""Processor time in seconds after which a rendering is slow and calls `make_way`."""
MAX_MADE = 16_000_000
"""Number of characters and list entries that a rendering can make, whatever the messages are."""
MADE_OF_ONE = 32
"""Number of characters and list entries that a rendering can make in addition for each character of
the messages, because most expressions copy what they change.
"""

_WIDE = re.compile(r"%[^%a-zA-Z]*(\*|\d{4,})|\{[^{}]*:[^{}]*\d{4,}|\{[^{}]*\{")
"""Format strings that turn a short text into a long one: wide, starred and nested fields."""


class OutOfBounds(Exception):
    """A template exceeds a limit. The message continues a sentence that begins with the template's
    name.
    """


class Account:
    """The characters and entries of lists that one rendering can still make.

    Attributes:
        most: the number that the rendering could make at its beginning.
        left: the number that it can still make.
    """

    def __init__(self, most: int) -> None:
        self.most = self.left = most

    def take(self, made: float) -> None:
        """Count something that was or will be made; OutOfBounds if it is too much."""
        self.left -= int(min(made, self.left + 1))
        if self.left < 0:
            raise OutOfBounds(
                f"takes too much memory: it was stopped at {self.most:,} characters. Give the "
                "model another template"
            )

    def foresee(self, made: float) -> None:
        """Check whether something of this size can be made, without counting it; OutOfBounds if
        not.
        """
        if made > self.left:
            self.take(made)


_account: ContextVar[Account | None] = ContextVar("account", default=None)
"""The account of the rendering in this thread; without one, nothing is counted."""

make_way: ContextVar[Callable[[], None] | None] = ContextVar("make_way", default=None)
"""Function that a slow rendering in this thread calls once, so that other work does not have to
wait until the rendering ends; None to call nothing.
"""


@contextmanager
def bounded(given: Any) -> Iterator[None]:
    """Stop a template that is rendered in this thread when it exceeds a limit (OutOfBounds).
    `given` are the messages and tools, whose size raises the limit.
    """
    _bound_compilation()
    began, steps, waiting = time.thread_time(), 0, make_way.get()
    until = began + MAX_SECONDS

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal steps, waiting
        steps += 1
        if not steps % 1000:
            time.sleep(REST)
            if waiting is not None and time.thread_time() > began + SLOW_SECONDS:
                waiting()
                waiting = None
        if steps > MAX_STEPS or (not steps % 1000 and time.thread_time() > until):
            raise OutOfBounds(
                f"does not finish: it was stopped after {MAX_STEPS:,} steps or {MAX_SECONDS:g} "
                "seconds. Give the model another template"
            )
        return trace if frame.f_code.co_filename == "<template>" else None

    token = _account.set(Account(MAX_MADE + MADE_OF_ONE * int(size_of(given))))
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        _account.reset(token)


@cache
def _bound_compilation() -> None:
    """Let transformers compile templates in an environment that counts, from now on."""
    known = chat_template_utils.__dict__
    known["ImmutableSandboxedEnvironment"] = BoundedEnvironment
    for name in ("_compile_jinja_template", "_cached_compile_jinja_template"):
        if forget := getattr(known.get(name), "cache_clear", None):
            forget()  # templates that were compiled before do not count what they make


def size_of(value: Any, most: float = inf, indent: int = 0, level: int = 1) -> float:
    """Count the characters of a value and its entries at any depth, up to `most`.

    Args:
        most: stop counting at this number; the result is then larger than `most`.
        indent: number of characters that are added for each entry, times its level.
        level: the level of the value's entries.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 8
    parts: Iterable[Any] = ()
    if isinstance(value, Mapping):
        parts = chain(value.keys(), value.values())
    elif isinstance(value, Sequence | Set) and not isinstance(value, range):
        parts = value
    total: float = 1
    for part in parts:
        total += 1 + indent * level + size_of(part, most - total, indent, level + 1)
        if total > most:
            break
    return total


class _CountingGenerator(CodeGenerator):
    """Generates Python code that counts what a template's expressions make."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Join texts with a method that counts them first."""
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """Count slices; other items already exist."""
        if isinstance(node.arg, nodes.Slice):
            self._count(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        """Count a list."""
        self._count(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """Count a dictionary."""
        self._count(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        """Count a tuple, unless names are set from it."""
        if node.ctx == "load":
            self._count(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _count(self, write: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.count(")
        write(node, frame)
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """An environment for chat templates that counts what they make inside `bounded`."""

    code_generator_class = _CountingGenerator
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def from_string(self, source: Any, *given: Any, **more: Any) -> Any:
        """Compile a template; its filters count what they make."""
        self.filters = {name: self._counted(name, each) for name, each in self.filters.items()}
        return super().from_string(source, *given, **more)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter so that it counts what it makes."""
        passed = int(hasattr(function, "jinja_pass_arg"))

        @wraps(function)
        def counted(*given: Any, **more: Any) -> Any:
            checked = _foresee(name, given[passed:], more)
            return self.count(function(*given[:passed], *checked, **more))

        return counted

    def count(self, value: Any) -> Any:
        """Count a value that was made; return it."""
        account = _account.get()
        if account is None:
            return value
        if isinstance(value, str | bytes | int):
            account.take(size_of(value))
        elif isinstance(value, Mapping | Sequence | Set) and not isinstance(value, range):
            account.take(len(value))
            account.foresee(size_of(value, account.most))
        return value

    def concat(self, texts: Iterable[str]) -> str:
        """Count texts, and join them."""
        account = _account.get()
        if account is None:
            return "".join(texts)
        parts = []
        for text in texts:
            account.left -= len(text)
            if account.left < 0:
                account.take(1)
            parts.append(text)
        return "".join(parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, unless the result is too large."""
        account = _account.get()
        if operator == "+" and type(left) is type(right) is str:  # calls are slow under a trace
            if account is not None:
                account.left -= len(left) + len(right)
                if account.left < 0:
                    account.take(1)
            return left + right
        _foresee(operator, (left, right))
        return self.count(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *given: Any, **more: Any) -> Any:
        """Call a function or method, unless the result is too large."""
        # The sandbox wraps str.format. `__wrapped__` is the method in the wrapper.
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        owners = (owner,) if isinstance(owner, str | bytes | int) else ()
        checked = _foresee(getattr(method, "__name__", ""), (*owners, *given), more)
        return __self.count(super().call(__context, __obj, *checked[len(owners) :], **more))


def _foresee(
    name: str, given: tuple[Any, ...], more: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Any, ...]:
    """Check whether the result of a function, method, filter or operator is within the limits
    (OutOfBounds).

    Returns:
        The arguments. An iterator is replaced by a list, because it must be read to be counted.
    """
    account, estimate = _account.get(), _ESTIMATES.get(name)
    if account is None or estimate is None or not given:
        return given
    given = tuple(list(each) if isinstance(each, Iterator) else each for each in given)
    account.foresee(estimate(account.most, *given, *more.values()))
    return given


def _of_product(most: int, value: Any, *others: Any) -> float:
    """Estimate the size of a text or list that is repeated, padded or indented."""
    return max(1, size_of(value, most)) * prod(max(1, _times(other, most)) for other in others)


def _times(value: Any, most: int) -> float:
    return abs(value) if isinstance(value, int) else size_of(value, most)


def _of_power(most: int, base: Any, exponent: Any) -> float:
    whole = isinstance(base, int) and isinstance(exponent, int)
    return size_of(base) * max(1, exponent) if whole else 0


def _of_times(most: int, left: Any, right: Any) -> float:
    if isinstance(left, int) and isinstance(right, int):
        return size_of(left) + size_of(right)
    return _of_product(most, *((right, left) if isinstance(left, int) else (left, right)))


def _of_format(most: int, text: Any, *given: Any) -> float:
    """Estimate the length of a filled format string; each field may hold all arguments."""
    if not isinstance(text, str):
        return 0
    if _WIDE.search(text.replace("{{", "")):
        return inf
    fields = text.count("%") + text.count("{")
    return len(text) + fields * size_of(given, most)


def _of_replace(most: int, text: Any, old: Any = "", new: Any = "", *_: Any) -> float:
    text, old, new = map(str, (text, old, new))
    return len(text) + text.count(old) * len(new)


def _of_json(most: int, value: Any, *options: Any) -> float:
    indent = max((_times(option, most) for option in options), default=0)
    return size_of(value, most, int(indent))


_ESTIMATES: dict[str, Callable[..., float]] = {
    "*": _of_times,
    "**": _of_power,
    "replace": _of_replace,
    "tojson": _of_json,
    **dict.fromkeys(("%", "format", "format_map"), _of_format),
    **dict.fromkeys(
        (
            *("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap"),
            *("join", "batch", "slice", "lipsum", "to_bytes", "round", "translate", "urlize"),
        ),
        _of_product,
    ),
}
"""By name, estimates of the largest result of operations whose result can be much larger than all
arguments together.
"""
