"""What all bodies are made of: numbers that are numbers, no field that is not here, a plain no."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints
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


def refused(message: str) -> PydanticCustomError:
    """What a validator raises for something that is not served."""
    return PydanticCustomError("unsupported", message)
