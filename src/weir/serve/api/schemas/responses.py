"""Bodies of responses and conversations, and of the items in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

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
    Given,
    Lenient,
    ListOf,
    Noted,
    Only,
    Skipped,
    Strict,
    Whole,
    bounded_dict,
    check_call_ids,
    show_name,
    unsupported,
)
from weir.serve.api.schemas.base import Name as PlainName
from weir.serve.api.schemas.chat import (
    Effort,
    GenerationBody,
    Limit,
    RefusalPart,
    TextPart,
    kind_of_part,
)
from weir.serve.api.schemas.formats import (
    AnyFlatTool,
    Description,
    FlatAllowed,
    FlatChoice,
    FlatName,
    FlatTool,
    ToolOffer,
    offered_places,
    skipped_tools,
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


class ItemPart(TextPart):
    """Text content of a message or of a tool result."""


AnyItemPart = Annotated[
    Annotated[ItemPart, Tag("a text")] | Annotated[RefusalPart, Tag("a refusal")],
    Discriminator(kind_of_part),
]


class MessageItem(Lenient):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | ListOf[AnyItemPart], Given]

    @field_validator("type", mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        # The discriminator treats an item of unknown type as a message.
        if value != "message":
            kinds = ", ".join(f"'{kind}'" for kind in ("message", *KINDS))
            skipped = ", ".join(f"'{kind}'" for kind in SKIPPED_KINDS)
            raise unsupported(
                f"must be one of {kinds}. These are accepted and have no effect: {skipped}"
            )
        return value

    def item(self) -> Item:
        """Convert to an item with a new id."""
        content = self.content
        texts = [content] if isinstance(content, str) else [part.text for part in content]
        return input_item(self.role, texts)


Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
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
    output: Annotated[str | ListOf[ItemPart], Given]

    def item(self) -> Item:
        """Convert to an item with a new id."""
        output = self.output
        if not isinstance(output, str):
            return result_item(self.call_id, [part.model_dump() for part in output])
        return result_item(self.call_id, output)


class OtherCallItem(Lenient):
    """A call of a tool that is not a function, in a history.

    The model reads it as a call of a function. Its arguments are `input` for `custom_tool_call`,
    the fields of the action for `local_shell_call` and `shell_call`, and those of the operation for
    `apply_patch_call`.
    """

    type: Literal["custom_tool_call", "local_shell_call", "shell_call", "apply_patch_call"]
    call_id: CallId
    name: PlainName | None = None
    input: str = ""
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "custom_tool_call" and self.name is None:
            raise unsupported("a custom_tool_call must have a name")
        return self

    def item(self) -> Item:
        """Convert to a call with a new id."""
        name = self.name or self.type.removesuffix("_call")
        given = {"input": self.input} if self.type == "custom_tool_call" else self.action
        call = Call(self.call_id, name, json.dumps(given or self.operation or {}))
        return call_item(new_id("fc"), call, "completed")


class OtherResultItem(Lenient):
    """The result of a call of a tool that is not a function.

    The result of a shell may be a list with the output of each command. The model reads the list as
    JSON.
    """

    type: Literal[
        "custom_tool_call_output",
        "local_shell_call_output",
        "shell_call_output",
        "apply_patch_call_output",
    ]
    call_id: CallId
    output: Annotated[
        str | ListOf[ItemPart] | ListOf[dict[str, Any]] | None, Field(union_mode="left_to_right")
    ] = None
    status: Annotated[str, StringConstraints(max_length=64)] | None = None

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        written = isinstance(self.output, list) and any(isinstance(o, dict) for o in self.output)
        if written and self.type != "shell_call_output":
            raise unsupported("the output must be a text or a list of text parts")
        if self.output is None and self.type != "apply_patch_call_output":
            raise unsupported("an output is required")
        return self

    def item(self) -> Item:
        """Convert to an item with a new id."""
        output = self.output
        if output is None:
            return result_item(self.call_id, self.status or "completed")
        if isinstance(output, str):
            return result_item(self.call_id, output)
        if all(isinstance(part, ItemPart) for part in output):
            parts = [part.model_dump() for part in output if isinstance(part, ItemPart)]
            return result_item(self.call_id, parts)
        return result_item(self.call_id, json.dumps(output, ensure_ascii=False))


class McpCallItem(Lenient):
    """A call of an MCP server's tool, together with the result, in a history.

    The model reads this item as a function call and the result of the call.
    """

    type: Literal["mcp_call"]
    id: CallId
    name: PlainName
    arguments: Arguments = "{}"
    output: str | None = None
    error: str | dict[str, Any] | None = None
    # These fields are accepted, but the model does not see them.
    server_label: str | None = None
    approval_request_id: str | None = None
    status: str | None = None

    def items(self) -> list[Item]:
        """Convert to a call and its result, with new ids."""
        error = self.error
        if isinstance(error, dict):
            error = json.dumps(error, ensure_ascii=False)
        result = self.output if error is None else f"Error: {error}"
        call = Call(self.id, self.name, self.arguments)
        return [
            call_item(new_id("fc"), call, "completed"),
            result_item(self.id, result or ""),
        ]


class ReferenceItem(Lenient):
    """An item of an earlier response, by its id."""

    type: Literal["item_reference"]
    id: Name

    def item(self) -> Item:
        """Return the reference, which the server replaces with the item."""
        return {"type": self.type, "id": self.id}


class CompactionItem(Lenient):
    """A stand-in for the whole conversation before it, from `POST /v1/responses/compact`."""

    type: Literal["compaction", "compaction_summary"]
    encrypted_content: Annotated[str, StringConstraints(max_length=256)]

    @field_validator("encrypted_content", mode="before")
    @classmethod
    def _check_ours(cls, value: Any) -> Any:
        if not (isinstance(value, str) and value.startswith(COMPACTED)):
            raise unsupported(
                "this compaction comes from another server, and this server cannot read it. Send "
                "the history instead"
            )
        return value

    def item(self) -> Item:
        """Return the item with the id of the turn that it stands for."""
        return {"type": "compaction", "turn": self.encrypted_content.removeprefix(COMPACTED)}


class SkippedItem(Skipped):
    """An item that is ignored, such as reasoning or a web search."""

    type: Annotated[str, StringConstraints(max_length=64)]


COMPACTED = "weir:"
"""Prefix of the content of this server's compactions."""
KINDS = {
    "function_call": "a call",
    "function_call_output": "a result",
    "custom_tool_call": "another call",
    "local_shell_call": "another call",
    "shell_call": "another call",
    "apply_patch_call": "another call",
    "mcp_call": "a call with its result",
    "shell_call_output": "another result",
    "apply_patch_call_output": "another result",
    "custom_tool_call_output": "another result",
    "local_shell_call_output": "another result",
    "item_reference": "a reference",
    "compaction": "a compaction",
    "compaction_summary": "a compaction",
}
SKIPPED_KINDS = (
    "reasoning",
    "web_search_call",
    "file_search_call",
    "image_generation_call",
    "code_interpreter_call",
    "mcp_list_tools",
    "tool_search_call",
    "tool_search_output",
    "compaction_trigger",
)


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str):
        return "a message"
    return "a skipped one" if kind in SKIPPED_KINDS else KINDS.get(kind, "a message")


# Tags that are not identifiers are left out of error paths.
AnyItem = Annotated[
    Annotated[MessageItem, Tag("a message")]
    | Annotated[CallItem, Tag("a call")]
    | Annotated[ResultItem, Tag("a result")]
    | Annotated[OtherCallItem, Tag("another call")]
    | Annotated[OtherResultItem, Tag("another result")]
    | Annotated[McpCallItem, Tag("a call with its result")]
    | Annotated[ReferenceItem, Tag("a reference")]
    | Annotated[CompactionItem, Tag("a compaction")]
    | Annotated[SkippedItem, Tag("a skipped one")],
    Discriminator(_kind),
]


def _check_calls(items: list[Any]) -> list[Any]:
    """Refuse two calls with the same id in one answer.

    An answer is a run of calls, skipped items and messages of the assistant. An `mcp_call` contains
    its result, so it is not part of a run.
    """
    answers = groupby(
        items,
        lambda item: (
            isinstance(item, CallItem | OtherCallItem | SkippedItem)
            or (isinstance(item, MessageItem) and item.role == "assistant")
        ),
    )
    for _, answer in answers:
        check_call_ids(
            item.call_id for item in answer if isinstance(item, CallItem | OtherCallItem)
        )
    return items


Items = Annotated[ListOf[AnyItem], AfterValidator(_check_calls)]
"""Items of one request."""


def _check_kept(items: list[Any]) -> list[Any]:
    """Refuse items that are ignored or stand for other items, which a conversation cannot keep."""
    for item in items:
        if isinstance(item, ReferenceItem | CompactionItem | SkippedItem):
            raise unsupported(
                f"a conversation cannot keep items of the type {item.type}. Leave the item out, or "
                "send the items that it stands for."
            )
    return items


class PlacedItem(NamedTuple):
    """An item, and the index of the client's item that it was made from."""

    item: Item
    place: int


def items_of(given: Iterable[Any]) -> list[PlacedItem]:
    """Return a client's items with new ids, without those that have no effect.

    One item can contain a call and its result, which become two items.
    """
    found: list[PlacedItem] = []
    for place, item in enumerate(given):
        if not isinstance(item, SkippedItem):
            made = item.items() if isinstance(item, McpCallItem) else [item.item()]
            found += [PlacedItem(one, place) for one in made]
    return found


KeptItems = Annotated[Items, AfterValidator(_check_kept)]


class ConversationBody(Strict):
    """Request body of `POST /v1/conversations`."""

    items: Annotated[KeptItems, Field(max_length=20)] | None = None
    metadata: Metadata | None = None


class MetadataBody(Strict):
    """Request body of `POST /v1/conversations/{name}`."""

    metadata: Metadata | None


class ItemsBody(Strict):
    """Request body of `POST /v1/conversations/{name}/items`."""

    items: Annotated[KeptItems, Field(min_length=1, max_length=20)]


LOGPROBS = "message.output_text.logprobs"

Label = Annotated[str, StringConstraints(max_length=512)]
"""A client's text, which is repeated in the response and has no other effect."""


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
            raise unsupported(f"type: json_schema needs a name and a schema. Missing: {missing}")
        if self.type != "json_schema" and missing != "name and schema":
            raise unsupported("name and schema are allowed only with type: json_schema")
        return self

    @property
    def held_to(self) -> tuple[dict[str, Any], bool] | None:
        """The schema of answers, and whether unknown keywords of the schema are refused.

        None if any text is allowed.
        """
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


class Reasoning(Noted):
    """Options for the model's reasoning."""

    effort: Effort | None = None


def split_at_compaction(items: list[PlacedItem]) -> tuple[PlacedItem | None, list[PlacedItem]]:
    """Return the last compaction, and the items after it.

    Without a compaction, returns None and all items.
    """
    found = [n for n, one in enumerate(items) if one.item["type"] == "compaction"]
    return (items[found[-1]], items[found[-1] + 1 :]) if found else (None, items)


class ResponseBody(GenerationBody):
    """Request body of `POST /v1/responses`."""

    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: Name | None = None
    conversation: Name | ConversationName | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    max_output_tokens: Limit | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    include: Annotated[ListOf[str], Field(max_length=16)] | None = None
    metadata: Metadata | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    text: TextOptions | None = None
    tools: Annotated[ListOf[AnyFlatTool], Field(max_length=128)] | None = None
    tool_choice: FlatChoice | None = None
    parallel_tool_calls: bool | None = None

    reasoning: Reasoning | None = None
    limit_field: ClassVar[str] = "max_output_tokens"

    client_metadata: Any = None
    context_management: Any = None
    max_tool_calls: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    stream_options: Any = None
    user: Any = None

    background: Annotated[Any, Only(None, False)] = None
    moderation: Annotated[Any, Only(None)] = None
    prompt: Annotated[Any, Only(None)] = None

    @model_validator(mode="after")
    def _note_items(self) -> Self:
        """Note the items that have no effect.

        This happens here, because the worker, which parses large bodies, returns them without
        their input.
        """
        if isinstance(self.input, list):
            for n, item in enumerate(self.input):
                if isinstance(item, SkippedItem):
                    self.note(f"input[{n}] ({item.type})")
        return self

    @property
    def effort_field(self) -> str:
        """The field that says how much the model should think."""
        return "reasoning.effort"

    @property
    def effort(self) -> str | None:
        """How much the model should think."""
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def functions(self) -> list[FlatTool]:
        """The tools that are functions."""
        return [tool for tool in self.tools or () if isinstance(tool, FlatTool)]

    @property
    def skipped(self) -> list[str]:
        """The parts of the request that have no effect, for a warning."""
        included = [f"include ({show_name(one)})" for one in self.include or () if one != LOGPROBS]
        if self.text is not None and self.text.verbosity is not None:
            included.append("text.verbosity")
        if self.text is not None and self.text.format is not None and self.text.format.description:
            included.append("text.format.description")
        if self.reasoning is not None:
            included += self.reasoning.skipped_in("reasoning")
        return [*super().skipped, *skipped_tools(self.tools), *included]

    @property
    def is_stored(self) -> bool:
        """Whether to store the response, which is the default."""
        return self.store is not False

    @property
    def logprobs(self) -> int | None:
        """Number of most likely tokens to report with each token; None for no log-probabilities."""
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return None

    @property
    def offer(self) -> ToolOffer:
        """The tools of the request."""
        tools, places = [tool.tool() for tool in self.functions], offered_places(self.tools)
        parallel, choice = self.parallel_tool_calls is not False, self.tool_choice
        if isinstance(choice, FlatName):
            chosen = "tool_choice.name"
            return ToolOffer(
                tools, "required", [choice.name], False, choice_param=chosen, places=places
            )
        if isinstance(choice, FlatAllowed):
            names = [tool.name for tool in choice.tools]
            chosen = "tool_choice.tools"
            return ToolOffer(
                tools, choice.mode, names, parallel, choice_param=chosen, places=places
            )
        return ToolOffer(tools, choice, None, parallel, places=places)

    @property
    def named(self) -> str | None:
        """The conversation's id."""
        found = self.conversation
        return found.id if isinstance(found, ConversationName) else found

    @property
    def items(self) -> list[PlacedItem]:
        """The input as items with ids."""
        if isinstance(self.input, str):
            return [PlacedItem(input_item("user", [self.input]), 0)]
        return items_of(self.input or ())


class CompactBody(ResponseBody):
    """Request body of `POST /v1/responses/compact`."""

    conversation: Annotated[Any, Only(None, instead="Send its items as input instead")] = None


def result_param(
    field: str, items: Sequence[Item], places: Sequence[int], error: StrayResult
) -> str | None:
    """Return the path of the tool result that an error is about, such as `input[3].call_id`.

    Returns None if the result is not in the request, but in the history that the request continues.

    Args:
        field: the field of the request that has the items.
        items: the newest items of the field.
        places: for each of these items, its index in the request (`PlacedItem`).
        error: the error about the result.
    """
    results = [n for n, item in enumerate(items) if item["type"] == "function_call_output"]
    at = len(results) - 1 - error.behind
    return None if at < 0 else f"{field}[{places[results[at]]}].call_id"
