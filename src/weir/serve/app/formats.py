"""What clients say of the form of an answer: `response_format`, tools and the choice among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from weir.serve.app.strict import Name, Strict, refused
from weir.serve.calls import Tool

Description = Annotated[str, StringConstraints(max_length=65_536)]


class JsonSchema(Strict):
    """A schema with a name."""

    name: Name
    description: Description | None = None
    of: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refused("json_schema goes with type: json_schema, and neither without the other")
        return self


class Function(Strict):
    """A function that a model may call."""

    name: Name
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    """One of `tools`."""

    type: Literal["function"]
    function: Function

    def tool(self) -> Tool:
        """The same, as the rest of the server knows it."""
        own = self.function
        return Tool(own.name, own.description, own.parameters, bool(own.strict))


class FunctionName(Strict):
    """Which function."""

    name: Name


class NamedTool(Strict):
    """The one function that is to be called."""

    type: Literal["function"]
    function: FunctionName


def _kind(value: Any) -> str:
    return "a word" if isinstance(value, str) else "a function"


# Tags that are no names stay out of what an error says of where it is.
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("a word")]
    | Annotated[NamedTool, Tag("a function")],
    Discriminator(_kind),
]


class CalledFunction(BaseModel):
    """What was called, in a message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: Name
    arguments: str


class ToolCall(BaseModel):
    """A call in a message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
