"""Annotations of parameters, and checks of arguments against them.

The parser of policies and the decorators of pools and policies share them. So `Sink(2.5)` in Python
and `sink(2.5)` in a policy get the same message.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar

from weir.errors import WeirError, format_value, quote

Make = TypeVar("Make", bound=Callable[..., Any])


@dataclass(frozen=True)
class Bounds:
    """The range of a parameter, from `low` to `high`.

    Attributes:
        without: an end of the range that does not belong to it.
        odd: whether only odd numbers are allowed.
    """

    low: float
    high: float = sys.float_info.max
    without: float | None = None
    odd: bool = False

    def __contains__(self, value: float) -> bool:
        inside = self.low <= value <= self.high and value != self.without
        return inside and not (self.odd and value % 2 == 0)

    def __str__(self) -> str:
        odd = " and odd" if self.odd else ""
        less = "less than " if self.without == self.high else ""
        high = f" to {less}{self.high:g}" if self.high < sys.float_info.max else ""
        low = "above" if self.without == self.low else "from" if high else "of at least"
        return f"{low} {self.low:g}{high}{odd}"


Count = Annotated[int, Bounds(1)]
"""Type of a parameter that is a whole number of at least 1."""
Natural = Annotated[int, Bounds(0)]
Kernel = Annotated[int, Bounds(1, odd=True)]
"""Number of neighboring places, with the token's place in the middle."""
Factor = Annotated[float, Bounds(0)]
Share = Annotated[float, Bounds(0, 1)]
Cosine = Annotated[float, Bounds(-1, 1)]


def argument_hints(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the parameters of a function or a class."""
    hints = typing.get_type_hints(make, include_extras=True)
    if isinstance(make, type):
        # Unlike the hints of its `__init__`, those of a class are resolved in the module of each
        # base class. They include attributes that are not parameters.
        hints = {name: hints[name] for name in inspect.signature(make).parameters}
    return hints


def convert_argument(owner: str, name: str, value: Any, hint: Any) -> Any:
    """Return an argument in the form that its parameter takes, with numbers as Python's own types.

    `owner` is the pool or policy, as errors call it, and `hint` the annotation of the parameter.
    Raises a `WeirError` if the value does not fit.
    """
    if not fits(value, hint):
        raise WeirError(f"{name} of {owner} must be {describe_hint(hint)}, got {quote(value)}")
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    kinds = [_bare(part) for part in _split_union(hint)]
    if isinstance(value, Integral) and int in kinds:
        return int(value)
    return float(value) if float in kinds else value


def check_arguments(make: Make, owner: str) -> Make:
    """Make a function, or a class in place, refuse arguments that its annotations do not allow."""
    called: Any = make.__init__ if isinstance(make, type) else make  # type: ignore[misc]
    signature = inspect.signature(called)

    @functools.wraps(called)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        wanted = argument_hints(make)
        for name, value in given.arguments.items():
            if name in wanted:  # `self` is not
                given.arguments[name] = convert_argument(owner, name, value, wanted[name])
        return called(*given.args, **given.kwargs)

    if isinstance(make, type):
        make.__init__ = check_and_call  # type: ignore[misc]
        return make
    return typing.cast(Make, check_and_call)


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value fits an annotation. Any value fits an annotation that weir does not
    know.
    """
    if len(_split_union(hint)) > 1:
        return any(fits(value, part) for part in _split_union(hint))
    if typing.get_origin(hint) is Annotated:
        return fits(value, _bare(hint)) and all(value in bounds for bounds in hint.__metadata__)
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if hint is types.NoneType:
        return value is None
    return not isinstance(hint, type) or isinstance(value, hint)


def describe_hint(hint: Any) -> str:
    """Describe an annotation in words."""
    if len(_split_union(hint)) > 1:
        return " or ".join(map(describe_hint, _split_union(hint)))
    if typing.get_origin(hint) is Annotated:
        return " ".join(map(str, (describe_hint(_bare(hint)), *hint.__metadata__)))
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(format_value, typing.get_args(hint)))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    if hint is types.NoneType:
        return "none"
    return words.get(hint, f"a {getattr(hint, '__name__', hint)}".lower())


def _bare(hint: Any) -> Any:
    """Return an annotation without the bounds of its numbers."""
    return hint.__origin__ if typing.get_origin(hint) is Annotated else hint


def _split_union(hint: Any) -> tuple[Any, ...]:
    """Return the annotations of a union, or the annotation itself."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)
