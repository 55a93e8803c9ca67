"""What all bodies are made of: numbers that are numbers, no field that is not here, a plain no."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    field_validator,
)
from pydantic_core import PydanticCustomError


def _whole(value: Any) -> Any:
    """100.0 is 100, as JSON has it; programs without integers send that."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
"""Of a function or a schema."""


class Strict(BaseModel):
    """A body whose numbers are numbers, and which has no field that is not here."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _harmless_only(schema: dict[str, Any], kind: type[BaseModel]) -> None:
    """Say in a schema what a field may be that is known and not served."""
    assert issubclass(kind, Known)
    for name, harmless in kind.unserved.items():
        schema["properties"][name]["enum"] = list(harmless)


class Known(Strict):
    """A body with fields that are known and not served, but for values that ask for nothing."""

    model_config = ConfigDict(json_schema_extra=_harmless_only)

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    instead: ClassVar[Mapping[str, str]] = {}

    @field_validator("*", mode="after")
    @classmethod
    def _harmless(cls, value: Any, info: Any) -> Any:
        name = info.field_name
        if name in cls.unserved and value not in cls.unserved[name]:
            raise refused(f"this is not served here; {cls.instead.get(name, 'leave it out')}")
        return value


def _arguments(value: str) -> str:
    """What a model has said of a call may have been cut short, and is no JSON then."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if not isinstance(found, dict):
        raise refused("the arguments of a call are an object, as JSON")
    return value


def refused(message: str) -> PydanticCustomError:
    """What a validator raises for something that is not served."""
    return PydanticCustomError("unsupported", message)


Arguments = Annotated[str, AfterValidator(_arguments)]
"""Of a call, as a text."""
