"""Fields about the format of an answer: `response_format`, `tools` and `tool_choice`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Discriminator, Field, StringConstraints, Tag, model_validator

from weir.serve.api.schemas.base import (
    Arguments,
    Lenient,
    ListOf,
    Name,
    Noted,
    Skipped,
    SkippedTool,
    Strict,
    show_name,
    unsupported,
)
from weir.serve.tools.formats import Tool
from weir.serve.tools.grammar import CallMode

Description = Annotated[str, StringConstraints(max_length=65_536)]


class JsonSchema(Strict):
    """A named JSON schema."""

    name: Name
    description: Description | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Format of the completion: text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise unsupported(
                "json_schema is required with type: json_schema, and not allowed with any other "
                "type"
            )
        return self

    @property
    def held_to(self) -> tuple[dict[str, Any], bool] | None:
        """The schema of answers, and whether unknown keywords of the schema are refused.

        None if any text is allowed.
        """
        named = self.json_schema
        if named is not None and named.schema_ is not None:
            return named.schema_, bool(named.strict)
        return None if self.type == "text" else ({"type": "object"}, True)


class Function(Noted):
    """A function that the model may call."""

    name: Name
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        """Convert to the server's own type."""
        return Tool(self.name, self.description, self.parameters, bool(self.strict))


class OfFunction(Strict):
    """An object with a type, which must be `function`."""

    type: Literal["function"]


class FunctionTool(Noted):
    """A tool: a function that the model may call."""

    type: Literal["function"]
    function: Function

    def skipped_in(self, place: str) -> list[str]:
        """The fields that have no effect, for a warning."""
        return super().skipped_in(place) + self.function.skipped_in(f"{place}.function")


class FlatTool(Function):
    """A tool of the Responses API: a function that the model may call."""

    type: Literal["function"]


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "a skipped one" if isinstance(kind, str) and kind != "function" else "a function"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("a function")] | Annotated[SkippedTool, Tag("a skipped one")],
    Discriminator(_kind_of_tool),
]
AnyFlatTool = Annotated[
    Annotated[FlatTool, Tag("a function")] | Annotated[SkippedTool, Tag("a skipped one")],
    Discriminator(_kind_of_tool),
]


def skipped_tools(tools: Sequence[FunctionTool | FlatTool | SkippedTool] | None) -> list[str]:
    """The tools, and fields of tools, that have no effect, for a warning."""
    skipped = []
    for n, tool in enumerate(tools or ()):
        if isinstance(tool, SkippedTool):
            skipped.append(f"tools[{n}] ({show_name(tool.type)})")
        else:
            skipped += tool.skipped_in(f"tools[{n}]")
    return skipped


def offered_places(tools: Sequence[Any] | None) -> list[int]:
    """Return the indices of the tools that the model is told about."""
    return [n for n, tool in enumerate(tools or ()) if not isinstance(tool, Skipped)]


class FunctionName(Strict):
    """The name of a function."""

    name: Name


class NamedTool(OfFunction):
    """Makes the model call this function."""

    function: FunctionName


class FlatName(FunctionName, OfFunction):
    """Makes the model call this function, in the Responses API."""


class SomeTools(Strict):
    """The tools that the model may call, and whether it must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[NamedTool], Field(min_length=1, max_length=128)]


class AllowedTools(Strict):
    """Restricts the model to some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


class FlatAllowed(Strict):
    """Restricts the model to some of the tools, in the Responses API."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[ListOf[FlatName], Field(min_length=1, max_length=128)]


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "a word"
    if not isinstance(value, dict | BaseModel):
        return None
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        return None
    return "some tools" if kind == "allowed_tools" else "a function"


_CHOICE = Discriminator(
    _kind,
    custom_error_type="unsupported",
    custom_error_message=(
        "must be 'none', 'auto', 'required' or an object of the type 'function' or 'allowed_tools'"
    ),
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
    """The tools that a client offers, in the same form for chats and responses.

    Attributes:
        tools: all tools that are described to the model.
        choice: whether the model may or must call a tool; None if the client does not say.
        names: names of the tools that the model may call; None for all.
        parallel: whether the model may make more than one call.
        schema_param: the field of the request with the schema of a tool, with `{}` for its index.
        choice_param: the field of the request that `names` comes from.
        own: names of the tools that the server runs; they are the last of `tools`.
        places: for each of the client's tools, its index in the request, where tools without an
            effect can be between them.
    """

    tools: Sequence[Tool]
    choice: CallMode | None = None
    names: Sequence[str] | None = None
    parallel: bool = True
    schema_param: str = "tools[{}].parameters"
    choice_param: str = "tool_choice"
    own: Sequence[str] = ()
    places: Sequence[int] = ()

    def schema_param_of(self, number: int) -> str:
        """Return the field of the request with the schema of a tool, by its index in `tools`."""
        at = self.places[number] if number < len(self.places) else number
        return self.schema_param.format(at)

    @property
    def callable(self) -> list[tuple[Tool, str]]:
        """The tools that the model may call, and the fields with their schemas."""
        found = [(tool, self.schema_param_of(n)) for n, tool in enumerate(self.tools)]
        names = self.names
        return found if names is None else [one for one in found if one[0].name in names]


class CalledFunction(Lenient):
    """The function and the arguments of a tool call."""

    name: Name
    arguments: Arguments


class ToolCall(Lenient):
    """A tool call that the model has made."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
