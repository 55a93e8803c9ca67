"""Fields about the format of an answer: `response_format`, `tools` and `tool_choice`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

from weir.serve.api.schemas.base import Arguments, ListOf, Name, Strict, unsupported
from weir.serve.tools import Tool
from weir.serve.tools.grammar import CallMode

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
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise unsupported(
                "json_schema goes with type: json_schema, and neither without the other"
            )
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
        """The tool, as the rest of the server knows it."""
        function = self.function
        return Tool(function.name, function.description, function.parameters, bool(function.strict))


class OfFunction(Strict):
    """Of all kinds of tools there is one here."""

    type: Literal["function"]


class FlatTool(Function, OfFunction):
    """One of `tools`, as responses have it."""

    def tool(self) -> Tool:
        """The tool, as the rest of the server knows it."""
        return Tool(self.name, self.description, self.parameters, bool(self.strict))


class FunctionName(Strict):
    """Which function."""

    name: Name


class NamedTool(Strict):
    """The one function that is to be called."""

    type: Literal["function"]
    function: FunctionName


class FlatName(FunctionName, OfFunction):
    """The same, as responses have it."""


class SomeTools(Strict):
    """Of all tools those that may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[NamedTool], Field(min_length=1, max_length=128)]


class AllowedTools(Strict):
    """The same, as one of the choices."""

    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


class FlatAllowed(Strict):
    """The same, as responses have it."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[FlatName], Field(min_length=1, max_length=128)]


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "a word"
    if not isinstance(value, dict | BaseModel):
        return None
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "some tools" if kind == "allowed_tools" else "a function"


_CHOICE = Discriminator(
    _kind,
    custom_error_type="unsupported",
    custom_error_message="it is to be 'none', 'auto', 'required' or an object",
)
# Tags that are not identifiers are left out of error paths.
Word = Annotated[Literal["none", "auto", "required"], Tag("a word")]
ToolChoice = Annotated[
    Word | Annotated[NamedTool, Tag("a function")] | Annotated[AllowedTools, Tag("some tools")],
    _CHOICE,
]
FlatChoice = Annotated[
    Word | Annotated[FlatName, Tag("a function")] | Annotated[FlatAllowed, Tag("some tools")],
    _CHOICE,
]


@dataclass(frozen=True)
class ToolOffer:
    """The tools that a client offers, the same for chats and responses.

    Attributes:
        tools: all that are described to the model.
        choice: whether the model calls any; None if the client does not say.
        names: names of the tools that the model may call; None for all.
        parallel: whether the model may make more than one call.
        schema_param: the field of the request with the schema of a tool, `{}` for its index.
        choice_param: the field with `names`.
    """

    tools: Sequence[Tool]
    choice: CallMode | None = None
    names: Sequence[str] | None = None
    parallel: bool = True
    schema_param: str = "tools[{}].parameters"
    choice_param: str = "tool_choice"


class CalledFunction(BaseModel):
    """What was called, in a message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: Name
    arguments: Arguments


class ToolCall(BaseModel):
    """A call in a message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
