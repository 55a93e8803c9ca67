"""Base classes and field types of request bodies."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import (
    InitErrorDetails,
    PydanticCustomError,
    PydanticKnownError,
    core_schema,
)

from weir.errors import quote
from weir.serve import patterns

T = TypeVar("T")
# Validation stops at the first wrong entry. An error for each would take seconds and gigabytes.
ListOf = Annotated[list[T], Field(fail_fast=True)]


def _whole(value: Any) -> Any:
    """Accept 100.0 as 100, because some clients have no integers."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Name = Annotated[str, StringConstraints(pattern=patterns.NAME)]
"""Name of a function or a schema in OpenAI's API."""
LongName = Annotated[str, StringConstraints(pattern=patterns.LONG_NAME)]
"""Name of a function in the other APIs."""


def bounded_dict(most: int) -> BeforeValidator:
    """Make a validator that refuses objects with more than `most` entries before looking at any."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            sizes = {"max_length": most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", {"field_type": "Dictionary", **sizes})
        return value

    return BeforeValidator(check)


def _given(value: Any) -> Any:
    """Refuse null as if the field were missing."""
    if value is None:
        raise PydanticKnownError("missing")
    return value


Given = BeforeValidator(_given)
"""Validator of a required field for which null is the same as leaving it out."""
SHOWN = 64
"""The most characters of a name from a request that a warning shows."""


def is_nothing(value: Any) -> bool:
    """Return whether a field with this value asks for nothing."""
    return value is None or value is False or (isinstance(value, list | dict) and not value)


class Strict(BaseModel):
    """An object that can have only the declared fields, and whose values are not converted.

    An unknown field is ignored if its value asks for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, value: Any) -> Any:
        """Remove unknown fields, except the first that asks for something, so that there is at
        most one error about them.
        """
        if not isinstance(value, dict):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [n for n, given in value.items() if n not in known and not is_nothing(given)][:1]
        return {name: value[name] for name in value if name in known or name in unknown}


class Noted(BaseModel):
    """An object whose unknown fields have no effect, and are named in a warning."""

    model_config = ConfigDict(extra="allow", strict=True)

    def skipped_in(self, place: str) -> list[str]:
        """Return the fields that have no effect, for a warning."""
        extra = self.model_extra or {}
        return [
            f"{place}.{show_name(name)}" for name, given in extra.items() if not is_nothing(given)
        ]


def show_name(name: str) -> str:
    """Escape and shorten a name from a request, so that a header can contain it."""
    shown = json.dumps(name)[1:-1].replace("\x7f", "\\u007f")
    return shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."


ECHOED = frozenset(
    {"id", "type", "status", "object", "index", "created_at", "logprobs"}
    | {"cache_control", "prompt_cache_breakpoint"}
)
"""Unknown fields that need no warning.

They repeat what a server said about an answer, or ask it to cache something that is always cached.
"""
MAX_NOTES = 1000


class Lenient(BaseModel):
    """A part of a message or an item, which may have unknown fields.

    Clients can thus send back what they received. `unknown_fields` finds the ones that a warning
    names.
    """

    model_config = ConfigDict(extra="allow", strict=True)


class Skipped(BaseModel):
    """An object that has no effect, and is named as a whole in a warning."""

    model_config = ConfigDict(extra="ignore", strict=True)


def unknown_fields(value: Any, place: str) -> Iterator[str]:
    """Find the unknown fields of messages, items and their parts, for a warning."""
    if isinstance(value, list):
        for n, one in enumerate(value):
            yield from unknown_fields(one, f"{place}[{n}]")
    elif isinstance(value, Lenient):
        for name, given in (value.model_extra or {}).items():
            if name not in ECHOED and not is_nothing(given):
                yield f"{place}.{show_name(name)}"
        for name in type(value).model_fields:
            given = getattr(value, name)
            if isinstance(given, list | BaseModel):
                yield from unknown_fields(given, f"{place}.{name}")


class SkippedTool(Skipped):
    """A tool that is not a function. The model is not told about it."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=256)]


class Only:
    """Refuses all values but `allowed`, in a field of a feature that is not supported.

    Args:
        allowed: values that ask for nothing.
        instead: what to do instead of using the field.
    """

    def __init__(self, *allowed: Any, instead: str = "Leave it out") -> None:
        self.allowed = allowed
        self._instead = instead

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: Any, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.allowed)}

    def _check(self, value: Any) -> Any:
        if value not in self.allowed:
            raise unsupported(f"not supported by this server. {self._instead}")
        return value


def _check_arguments(value: str, info: ValidationInfo) -> str:
    """Check the arguments of a call. Invalid JSON is accepted, because the model may have been cut
    off.

    The arguments are JSON inside a text of the body. `info.context` counts their objects, lists and
    fields together with those of the body (`parse_body`).
    """
    if info.context is not None:
        info.context(value)
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if not isinstance(found, dict):
        raise unsupported("the arguments of a call must be an object, as JSON")
    return value


def unsupported(message: str) -> PydanticCustomError:
    """Make the validation error for an unsupported feature."""
    return PydanticCustomError("unsupported", message)


THOUGHTS = frozenset(
    {"reasoning_content", "reasoning", "reasoning_details", "thinking", "thinking_blocks"}
)
"""Fields of an assistant's message in which servers and clients keep the thoughts."""


def check_content(message: Lenient, role: str, *others: Any) -> None:
    """Refuse a message without content (ValidationError).

    An empty text is content. An assistant's message needs none if it has one of the `others`, or
    thoughts.
    """
    if getattr(message, "content", None) is not None:
        return
    extra = message.model_extra or {}
    if role == "assistant" and any((*others, *(extra.get(name) for name in THOUGHTS))):
        return
    lines = InitErrorDetails(type="missing", loc=("content",), input=None)
    raise ValidationError.from_exception_data("message", [lines])


def check_limit(value: int) -> int:
    """Refuse a limit of 0 tokens."""
    if value == 0:
        raise unsupported("must be at least 1, or -1 for as many tokens as the server allows")
    return value


def check_call_ids(ids: Iterable[str]) -> None:
    """Refuse calls with the same id in one message, because their results could not be told
    apart.
    """
    known: set[str] = set()
    for name in ids:
        if name in known:
            raise unsupported(
                f"two calls of one message have the id {quote(name)}. Give each its own id."
            )
        known.add(name)


Arguments = Annotated[str, AfterValidator(_check_arguments)]
"""Arguments of a call, as a text."""
