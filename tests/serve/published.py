"""Request bodies made from the types that the packages openai, anthropic and ollama publish.

A `Variant` is a small body of a route with one more field, at any depth, and the path to it.
"""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import typing_extensions
from pydantic import BaseModel

DEPTH = 6
"""How many levels of objects within objects get a field."""
WORDS = ("x", "y")
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Variant:
    """A body, and the path of the field that it has in addition to what is required."""

    path: Path
    body: dict[str, Any]

    @property
    def name(self) -> str:
        """The path as messages write it."""
        name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.path)
        return name.removeprefix(".")

    @property
    def value(self) -> Any:
        """The value of the field."""
        found: Any = self.body
        for step in self.path:
            found = found[step]
        return found

    def __str__(self) -> str:
        return f"{self.name} = {str(self.value)[:40]}"


def fields_of(kind: Any) -> dict[str, tuple[Any, bool]] | None:
    """The fields of an object's type, and whether each is required; None for other types."""
    if typing.is_typeddict(kind) or typing_extensions.is_typeddict(kind):
        hints = typing_extensions.get_type_hints(kind, include_extras=True)
        # Not from `__required_keys__`, which misses required fields if annotations are strings.
        wanted = (typing.Required, typing_extensions.Required)
        return {
            name: (hint, kind.__total__ or get_origin(hint) in wanted)
            for name, hint in hints.items()
        }
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        found = kind.model_fields.items()
        return {name: (field.annotation, field.is_required()) for name, field in found}
    return None


def variants(kind: Any, depth: int = DEPTH) -> Iterator[tuple[Path, Any]]:
    """Values of a type, each with the path to the part that is new; () for the whole value."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (
        typing.Annotated,
        typing_extensions.Required,
        typing_extensions.NotRequired,
    ) or origin in (typing.Required, typing.NotRequired):
        yield from variants(args[0], depth)
    elif origin in (Union, types.UnionType):
        for one in args:
            if one is not type(None):
                yield from variants(one, depth)
    elif origin is Literal:
        yield from (((), one) for one in args)
    elif hasattr(kind, "__value__"):
        yield from variants(kind.__value__, depth)
    elif (fields := fields_of(kind)) is not None:
        yield from _objects(fields, depth)
    elif origin in (list, collections.abc.Iterable, collections.abc.Sequence, tuple) or (
        origin is not None and "SequenceNotStr" in str(origin)
    ):
        for path, value in variants(args[0], depth - 1):
            yield ((0, *path) if path else (), [value])
    elif origin in (dict, collections.abc.Mapping):
        first = next((value for _, value in variants(args[1], depth - 1)), "x")
        yield (), {"x": first}
    elif kind is bool:
        yield from (((), True), ((), False))
    elif kind is int:
        yield (), 1
    elif kind is float:
        yield (), 0.5
    elif kind in (object, Any):
        yield (), {"x": 1}
    else:
        yield (), WORDS[0]


def _objects(fields: dict[str, tuple[Any, bool]], depth: int) -> Iterator[tuple[Path, Any]]:
    base = {n: _first(hint, depth) for n, (hint, required) in fields.items() if required}
    yield (), base
    if depth <= 0:
        return
    for name, (hint, _) in fields.items():
        for path, value in variants(hint, depth - 1):
            yield (name, *path), {**base, name: value}


def _first(hint: Any, depth: int) -> Any:
    return next(value for _, value in variants(hint, depth - 1))


def bodies(kind: Any, base: dict[str, Any]) -> Iterator[Variant]:
    """Bodies of a route, from the type of its parameters and a body that the route accepts."""
    fields = fields_of(kind)
    assert fields is not None
    seen = set()
    for name, (hint, _) in fields.items():
        for path, value in variants(hint):
            variant = Variant((name, *path), {**base, name: value})
            if (key := repr((variant.path, value))) not in seen:
                seen.add(key)
                yield variant
