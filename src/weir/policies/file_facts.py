"""Facts in files that may come from elsewhere: pydantic models, and errors that name the wrong
fact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weir.errors import WeirError, quote

FARTHEST = 2**53
"""Longest stream: the largest whole number that every JSON reader reads exactly."""

T = TypeVar("T")
Whole = Annotated[int, Field(ge=0, le=FARTHEST)]
"""A whole number from 0 to `FARTHEST`, such as a count of tokens."""
# Validation stops at the first wrong entry, because one error for each entry could take seconds and
# gigabytes.
ListOf = Annotated[list[T], Field(fail_fast=True)]


class FileFacts(BaseModel):
    """Facts by name: exactly the fields of the class, without conversions of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, value: Any) -> Any:
        """Keep only the first of many unknown fields, because each would cause an error."""
        if not isinstance(value, dict):
            return value
        unknown = [name for name in value if name not in cls.model_fields][:1]
        return {name: value[name] for name in value if name in cls.model_fields or name in unknown}


F = TypeVar("F", bound=FileFacts)

WANTED = {
    "string_type": "a text",
    "string_unicode": "a text of whole characters",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_pattern_mismatch": "a text that fits {pattern}",
}
"""Descriptions of valid facts, by pydantic's name of the error."""


def read_facts(model: type[F], found: Any, whole: str = "the content") -> F:
    """Validate the facts in a file; the WeirError names the first that is wrong.

    Args:
        model: describes the facts that are expected.
        found: the content of the file, as parsed from JSON or TOML.
        whole: what to call all the facts together in an error.
    """
    try:
        return model.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=True)[0]
        raise WeirError(_describe_error(first, whole)) from None


def _describe_error(error: Mapping[str, Any], whole: str) -> str:
    place, kind = place_of(error["loc"]) or whole, error["type"]
    if kind == "missing":
        return f"{place} is missing"
    if kind == "extra_forbidden":
        before = place_of(error["loc"][:-1])
        return f"unexpected field {quote(error['loc'][-1])}{f' in {before}' if before else ''}"
    ctx = error.get("ctx") or {}
    if kind in ("too_short", "too_long"):
        count = ctx.get("min_length", ctx.get("max_length"))
        return f"{place} must have {count} entries, got {len(error['input'])}"
    wanted = WANTED[kind].format(**ctx) if kind in WANTED else error["msg"]
    return f"{place} must be {wanted}, got {describe_value(error['input'])}"


def place_of(loc: Sequence[int | str]) -> str:
    """Write the path of a fact, such as `rows[0].seen`."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = part if part.isidentifier() else quote(part)
            path += f".{name}" if path else name
    return path


def describe_value(value: Any) -> str:
    """Describe a value from JSON or TOML in a few words."""
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)} fields"
    return (
        quote(value)
        if not isinstance(value, int) or abs(value) < 10**30
        else "a number of more than 30 digits"
    )
