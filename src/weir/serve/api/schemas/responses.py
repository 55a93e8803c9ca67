"""Bodies of responses and conversations, and of the items in them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)

from weir.serve.api.schemas.base import (
    Arguments,
    Lenient,
    ListOf,
    Only,
    Strict,
    Whole,
    bounded_dict,
    check_call_ids,
    unsupported,
)
from weir.serve.api.schemas.base import Name as PlainName
from weir.serve.api.schemas.chat import GenerationBody
from weir.serve.api.schemas.formats import (
    Description,
    FlatAllowed,
    FlatChoice,
    FlatName,
    FlatTool,
    ToolOffer,
)
from weir.serve.messages import Call, StrayResult
from weir.serve.sessions.items import Item, call_item, input_item, new_id, result_item

Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
    bounded_dict(16),
]


class ItemPart(Lenient):
    """Text content of a message or of a tool result."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class MessageItem(Lenient):
    """A message. Unknown fields are ignored, so that output items can be sent back."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | ListOf[ItemPart]

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        # The discriminator treats an item of unknown type as a message.
        if value != "message":
            raise unsupported("it is to be 'message', 'function_call' or 'function_call_output'")
        return value

    def item(self) -> Item:
        """Convert to an item with a new id."""
        content = self.content
        texts = [content] if isinstance(content, str) else [part.text for part in content]
        return input_item(self.role, texts)


CallId = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class CallItem(Lenient):
    """A function call that the model has made."""

    type: Literal["function_call"]
    call_id: CallId
    name: PlainName
    arguments: Arguments

    def item(self) -> Item:
        """Convert to an item with a new id."""
        return call_item(new_id("fc"), Call(self.call_id, self.name, self.arguments), "completed")


class ResultItem(Lenient):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: str | ListOf[ItemPart]

    def item(self) -> Item:
        """Convert to an item with a new id."""
        output = self.output
        if not isinstance(output, str):
            return result_item(self.call_id, [part.model_dump() for part in output])
        return result_item(self.call_id, output)


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    known = {"function_call": "a call", "function_call_output": "a result"}
    return known.get(kind, "a message") if isinstance(kind, str) else "a message"


# Tags that are not identifiers are left out of error paths.
AnyItem = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("a call")]
    | Annotated[ResultItem, Tag("a result")],
    Discriminator(_kind),
]


def _check_calls(items: list[Any]) -> list[Any]:
    """Check the ids of the calls in each answer, which no other message interrupts."""
    answers = groupby(
        items,
        lambda item: (
            isinstance(item, CallItem)
            or (isinstance(item, MessageItem) and item.role == "assistant")
        ),
    )
    for _, answer in answers:
        check_call_ids(item.call_id for item in answer if isinstance(item, CallItem))
    return items


Items = Annotated[ListOf[AnyItem], AfterValidator(_check_calls)]
"""Items of one request."""


class ConversationBody(Strict):
    """Request body of `POST /v1/conversations`."""

    items: Annotated[Items, Field(max_length=20)] | None = None
    metadata: Metadata | None = None


class MetadataBody(Strict):
    """Request body of `POST /v1/conversations/{name}`."""

    metadata: Metadata | None


class ItemsBody(Strict):
    """Request body of `POST /v1/conversations/{name}/items`."""

    items: Annotated[Items, Field(min_length=1, max_length=20)]


LOGPROBS = "message.output_text.logprobs"

Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
Label = Annotated[str, StringConstraints(max_length=512)]
"""A text of the client's own, which is repeated in the response and has no effect."""


class TextFormat(Strict):
    """Format of the response: text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: PlainName | None = None
    description: Description | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        fields = {"name": self.name, "schema": self.schema_}
        missing = " and ".join(name for name, value in fields.items() if value is None)
        if self.type == "json_schema" and missing:
            raise unsupported(f"type: json_schema needs a name and a schema; here is no {missing}")
        if self.type != "json_schema" and missing != "name and schema":
            raise unsupported("name and schema go with type: json_schema, and not without it")
        return self

    @property
    def held_to(self) -> tuple[dict[str, Any], bool] | None:
        """The schema of answers, and whether unknown keywords are refused; None for text."""
        if self.schema_ is not None:
            return self.schema_, bool(self.strict)
        return None if self.type == "text" else ({"type": "object"}, True)


class TextOptions(Strict):
    """Options of the response's text."""

    format: TextFormat | None = None
    verbosity: Any = None


class ConversationName(Strict):
    """A conversation, as an object with its id."""

    id: Name


class ResponseBody(GenerationBody):
    """Request body of `POST /v1/responses`."""

    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    conversation: Name | ConversationName | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    include: Annotated[ListOf[str], Field(max_length=16)] | None = None
    metadata: Metadata | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    text: TextOptions | None = None
    tools: Annotated[ListOf[FlatTool], Field(max_length=128)] | None = None
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

    background: Annotated[Any, Only(None, False)] = None
    moderation: Annotated[Any, Only(None)] = None
    prompt: Annotated[Any, Only(None)] = None

    @property
    def is_stored(self) -> bool:
        """Whether to store the response, which is the default."""
        return self.store is not False

    @property
    def logprobs(self) -> int | None:
        """Number of most likely tokens to report with each; None for no log-probabilities."""
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return None

    @property
    def offer(self) -> ToolOffer:
        """The tools of the request."""
        tools = [tool.tool() for tool in self.tools or ()]
        parallel, choice = self.parallel_tool_calls is not False, self.tool_choice
        if isinstance(choice, FlatName):
            param = "tool_choice.name"
            return ToolOffer(tools, "required", [choice.name], False, choice_param=param)
        if isinstance(choice, FlatAllowed):
            names = [tool.name for tool in choice.tools]
            return ToolOffer(tools, choice.mode, names, parallel, choice_param="tool_choice.tools")
        return ToolOffer(tools, choice, None, parallel)

    @property
    def named(self) -> str | None:
        """The conversation's id."""
        found = self.conversation
        return found.id if isinstance(found, ConversationName) else found

    @property
    def items(self) -> list[Item]:
        """The input as items with ids."""
        if isinstance(self.input, str):
            return [input_item("user", [self.input])]
        return [item.item() for item in self.input or ()]


def result_param(field: str, items: Sequence[Item], error: StrayResult) -> str | None:
    """The path of a stray result in a field of the request; None if it comes before its items."""
    results = [n for n, item in enumerate(items) if item["type"] == "function_call_output"]
    at = len(results) - 1 - error.behind
    return None if at < 0 else f"{field}[{results[at]}].call_id"
