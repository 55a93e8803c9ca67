"""What clients send to `/v1/responses`, with a bound on every number and list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from weir.serve.api.schemas.base import Name as SchemaName
from weir.serve.api.schemas.base import Strict, Whole, refused
from weir.serve.api.schemas.chat import Asking
from weir.serve.api.schemas.formats import (
    Description,
    FlatAllowed,
    FlatChoice,
    FlatName,
    FlatTool,
    JsonSchema,
    Offer,
    ResponseFormat,
)
from weir.serve.api.schemas.items import AnyItem, Metadata
from weir.serve.sessions import Item, input_item

IGNORED = (
    "context_management",
    "max_tool_calls",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning",
    "service_tier",
    "stream_options",
    "user",
)
REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "moderation": (None,),
    "prompt": (None,),
}
LOGPROBS = "message.output_text.logprobs"

Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Label = Annotated[str, StringConstraints(max_length=512)]
"""A word of the client's own, which is told back and changes nothing."""


class TextFormat(Strict):
    """The form of an answer: `ResponseFormat`, with the schema's facts beside its type."""

    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    description: Description | None = None
    of: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _together(self) -> Self:
        said = {"name": self.name, "schema": self.of}
        missing = " and ".join(name for name, value in said.items() if value is None)
        if self.type == "json_schema" and missing:
            raise refused(f"type: json_schema needs a name and a schema; here is no {missing}")
        if self.type != "json_schema" and missing != "name and schema":
            raise refused("name and schema go with type: json_schema, and not without it")
        return self

    @property
    def wanted(self) -> ResponseFormat:
        """The same as chats have it."""
        if self.name is None:
            return ResponseFormat(type=self.type)
        return ResponseFormat(
            type=self.type,
            json_schema=JsonSchema(name=self.name, schema=self.of, strict=self.strict),
        )


class TextOptions(Strict):
    """What an answer is to look like."""

    format: TextFormat | None = None
    verbosity: Any = None


class ConversationName(Strict):
    """A conversation, where it is not named by its id alone."""

    id: Name


class ResponseBody(Asking):
    """`POST /v1/responses`."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = REFUSED

    input: str | list[AnyItem] | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    conversation: Name | ConversationName | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    include: Annotated[list[str], Field(max_length=16)] | None = None
    metadata: Metadata | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Field(max_length=128)] | None = None
    tool_choice: FlatChoice | None = None
    parallel_tool_calls: bool | None = None

    context_management: Any = None
    max_tool_calls: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    service_tier: Any = None
    stream_options: Any = None
    user: Any = None

    background: Any = None
    moderation: Any = None
    prompt: Any = None

    @property
    def kept(self) -> bool:
        """Whether it is to be retrieved and gone on from; so it is if nothing is said."""
        return self.store is not False

    @property
    def logprobs(self) -> int | None:
        """How many of the likeliest tokens are told with each; None for none at all."""
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return None

    @property
    def form(self) -> ResponseFormat | None:
        """The form of the answer; None for any."""
        found = self.text.format if self.text else None
        return None if found is None else found.wanted

    @property
    def offer(self) -> Offer:
        """What is said of tools."""
        tools = [each.tool() for each in self.tools or ()]
        several, choice = self.parallel_tool_calls is not False, self.tool_choice
        if isinstance(choice, FlatName):
            return Offer(tools, "required", [choice.name], False, chosen="tool_choice.name")
        if isinstance(choice, FlatAllowed):
            names = [each.name for each in choice.tools]
            return Offer(tools, choice.mode, names, several, chosen="tool_choice.tools")
        return Offer(tools, choice, None, several)

    @property
    def named(self) -> str | None:
        """The conversation's id."""
        found = self.conversation
        return found.id if isinstance(found, ConversationName) else found

    @property
    def items(self) -> list[Item]:
        """What is said, as items with ids."""
        if isinstance(self.input, str):
            return [input_item("user", [self.input])]
        return [item.item() for item in self.input or ()]
