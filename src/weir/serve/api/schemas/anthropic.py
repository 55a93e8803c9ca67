"""Bodies of Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag, model_validator
from pydantic_core import PydanticCustomError

from weir.serve.api.schemas.base import (
    Given,
    Lenient,
    ListOf,
    LongName,
    Noted,
    Only,
    Skipped,
    check_call_ids,
    show_name,
    unsupported,
)
from weir.serve.api.schemas.chat import GenerationBody, Limit, Stop
from weir.serve.api.schemas.formats import Description, ToolOffer, offered_places
from weir.serve.messages import Call, Message
from weir.serve.tools.formats import Tool

BILLING = "x-anthropic-billing-header:"
"""Prefix of a text block in Claude Code's system messages.

The block differs in each request, and is left out.
"""
GAP = "\n"
"""Separator between text blocks. The blocks of an assistant's message are joined without it."""


class TextBlock(Lenient):
    """Text of a message."""

    type: Literal["text"]
    text: Annotated[str, Given]


class CallBlock(Lenient):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    name: LongName
    input: dict[str, Any]

    def call(self) -> Call:
        """Convert to the server's own type."""
        return Call(self.id, self.name, json.dumps(self.input))


class ResultBlock(Lenient):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    content: str | ListOf[TextBlock] | None = None

    def message(self) -> Message:
        """Convert to the server's own type."""
        content = self.content or ""
        if not isinstance(content, str):
            content = GAP.join(block.text for block in content)
        return Message("tool", content, result=self.tool_use_id)


class SkippedBlock(Skipped):
    """A block that is ignored in a history: thinking, or a call or result of Anthropic's tools."""

    type: Annotated[str, StringConstraints(max_length=64)]


SKIPPED_BLOCKS = (
    "thinking",
    "redacted_thinking",
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "tool_search_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
)


def _kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    tags = {"tool_use": "a call", "tool_result": "a result"}
    if not isinstance(kind, str):
        return "a text"
    return "a skipped one" if kind in SKIPPED_BLOCKS else tags.get(kind, "a text")


Block = Annotated[
    Annotated[TextBlock, Tag("a text")]
    | Annotated[CallBlock, Tag("a call")]
    | Annotated[ResultBlock, Tag("a result")]
    | Annotated[SkippedBlock, Tag("a skipped one")],
    Discriminator(_kind),
]


class AnthropicMessage(Lenient):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | ListOf[Block], Given]

    @model_validator(mode="after")
    def _check_blocks(self) -> AnthropicMessage:
        blocks = [] if isinstance(self.content, str) else self.content
        for block in blocks:
            if isinstance(block, CallBlock) and self.role != "assistant":
                raise unsupported("tool_use is allowed only in messages with the role assistant")
            if isinstance(block, ResultBlock) and self.role != "user":
                raise unsupported("tool_result is allowed only in messages with the role user")
        check_call_ids(block.id for block in blocks if isinstance(block, CallBlock))
        return self

    def messages(self) -> list[Message]:
        """Convert to the server's own type. Each tool result becomes a separate message."""
        if isinstance(self.content, str):
            return [Message(self.role, self.content)]
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        if self.role == "assistant":
            calls = tuple(block.call() for block in self.content if isinstance(block, CallBlock))
            return [Message(self.role, "".join(texts), calls=calls)]
        found = [block.message() for block in self.content if isinstance(block, ResultBlock)]
        return [*found, Message(self.role, GAP.join(texts))] if texts or not found else found


class AnthropicTool(Noted):
    """One of the client's tools."""

    type: Literal["custom"] | None = None
    name: LongName
    description: Description | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: Any = None

    def tool(self) -> Tool:
        """Convert to the server's own type."""
        return Tool(self.name, self.description, self.input_schema, bool(self.strict))


class AnthropicSkippedTool(Skipped):
    """One of Anthropic's own tools. The model is not told about it."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=64)]


def _kind_of_tool(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "a skipped one" if isinstance(kind, str) and kind != "custom" else "a function"


class AnthropicChoice(Lenient):
    """Whether the model may or must call tools, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: LongName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> AnthropicChoice:
        if (self.type == "tool") != (self.name is not None):
            raise unsupported(
                "name is required with type: tool, and not allowed with any other type"
            )
        return self


class AnthropicThinking(Noted):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]


class AnthropicFormat(Lenient):
    """Format of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class AnthropicOutput(Noted):
    """Options of the answer."""

    format: AnthropicFormat | None = None
    effort: Annotated[str, StringConstraints(max_length=64)] | None = None


def _refuse_thread(value: object) -> None:
    """Refuse to keep a thread. When Anthropic's SDKs receive this error code, they send the whole
    conversation.
    """
    if value is not None:
        raise PydanticCustomError(
            "thread_unsupported_request",
            "threads are not supported. Leave out thread and send the whole conversation. The "
            "server does not read again what it has already read",
        )


class CountBody(GenerationBody):
    """Request body of `POST /v1/messages/count_tokens`."""

    messages: Annotated[ListOf[AnthropicMessage], Field(min_length=1), Given]
    system: str | ListOf[TextBlock] | None = None
    tools: (
        Annotated[
            ListOf[
                Annotated[
                    Annotated[AnthropicTool, Tag("a function")]
                    | Annotated[AnthropicSkippedTool, Tag("a skipped one")],
                    Discriminator(_kind_of_tool),
                ]
            ],
            Field(max_length=512),
        ]
        | None
    ) = None
    tool_choice: AnthropicChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: AnthropicOutput | None = None
    output_format: AnthropicFormat | None = None

    cache_control: Any = None
    context_management: Any = None
    thread: Annotated[None, BeforeValidator(_refuse_thread)] = None

    @model_validator(mode="after")
    def _note_parts(self) -> CountBody:
        """Note the parts that have no effect.

        This happens here, because the worker, which parses large bodies, returns them without
        their messages.
        """
        if self._billing:
            self.note("system (the billing header)")
        for n, message in enumerate(self.messages):
            for at, block in enumerate([] if isinstance(message.content, str) else message.content):
                if isinstance(block, SkippedBlock):
                    self.note(f"messages[{n}].content[{at}] ({block.type})")
        return self

    @property
    def _billing(self) -> bool:
        blocks = [] if self.system is None or isinstance(self.system, str) else self.system
        return any(block.text.startswith(BILLING) for block in blocks)

    @property
    def history(self) -> list[Message]:
        """The messages, converted to the server's own type."""
        system = self.system or ""
        if not isinstance(system, str):
            texts = (block.text for block in system)
            system = GAP.join(text for text in texts if not text.startswith(BILLING))
        found = [Message("system", system)] if system else []
        return [*found, *(one for message in self.messages for one in message.messages())]

    @property
    def effort_field(self) -> str:
        """The field that says how much the model should think."""
        return "output_config.effort" if self.thinking is None else "thinking"

    @property
    def effort(self) -> str | None:
        """How much the model should think."""
        if self.thinking is not None:
            return "none" if self.thinking.type == "disabled" else "high"
        return None if self.output_config is None else self.output_config.effort

    @property
    def held_to(self) -> tuple[dict[str, Any], bool] | None:
        """The schema of answers, and whether unknown keywords of the schema are refused.

        None if any text is allowed.
        """
        found = self.output_format
        if found is None and self.output_config is not None:
            found = self.output_config.format
        return None if found is None else (found.schema_, True)

    @property
    def offer(self) -> ToolOffer:
        """The tools of the request."""
        tools = [tool.tool() for tool in self.tools or () if isinstance(tool, AnthropicTool)]
        schema, choice = "tools[{}].input_schema", self.tool_choice
        places = offered_places(self.tools)
        if choice is None:
            return ToolOffer(tools, schema_param=schema, places=places)
        parallel = not choice.disable_parallel_tool_use
        if choice.type == "tool":
            names, chosen = [choice.name or ""], "tool_choice.name"
            return ToolOffer(tools, "required", names, False, schema, chosen, places=places)
        modes: dict[str, Literal["none", "auto", "required"]] = {
            "auto": "auto",
            "any": "required",
            "none": "none",
        }
        return ToolOffer(tools, modes[choice.type], None, parallel, schema, places=places)

    @property
    def skipped(self) -> list[str]:
        """The parts of the request that have no effect, for a warning."""
        found = super().skipped
        for n, tool in enumerate(self.tools or ()):
            if isinstance(tool, AnthropicSkippedTool):
                found.append(f"tools[{n}] ({show_name(tool.type)})")
            else:
                found += tool.skipped_in(f"tools[{n}]")
        if self.thinking is not None:
            found += self.thinking.skipped_in("thinking")
        if self.output_config is not None:
            found += self.output_config.skipped_in("output_config")
            if self.thinking is not None and self.output_config.effort is not None:
                found.append("output_config.effort")  # `thinking` decides
        return [one for one in found if one != "cache_control"]  # everything is always cached


class AnthropicBody(CountBody):
    """Request body of `POST /v1/messages`."""

    max_tokens: Limit
    stop_sequences: Annotated[ListOf[Stop], Field(max_length=16)] | None = None

    metadata: Any = None
    service_tier: Any = None
    inference_geo: Any = None
    speed: Any = None
    diagnostics: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None

    container: Annotated[Any, Only(None)] = None
    mcp_servers: Annotated[Any, Only(None, [])] = None

    @property
    def stops(self) -> list[str]:
        """The stop sequences."""
        return list(self.stop_sequences or ())
