"""Bodies of Ollama's API."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from weir.serve.api.schemas.base import (
    Lenient,
    ListOf,
    LongName,
    Only,
    Strict,
    check_call_ids,
    check_content,
    unsupported,
)
from weir.serve.api.schemas.chat import GenerationBody, Limit
from weir.serve.api.schemas.formats import (
    AnyTool,
    FunctionTool,
    ToolOffer,
    offered_places,
    skipped_tools,
)
from weir.serve.messages import Call, Message

TAG = ":latest"
"""Suffix that Ollama's clients add to the name of a model if the user names no version."""


class OllamaFunction(Lenient):
    """The function and the arguments of a call."""

    name: LongName
    arguments: dict[str, Any]


class OllamaCall(Lenient):
    """A call that the model has made."""

    id: Annotated[str, StringConstraints(max_length=256)] | None = None
    function: OllamaFunction


class OllamaMessage(Lenient):
    """A message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Any = None
    tool_calls: Annotated[ListOf[OllamaCall], Field(max_length=128)] | None = None
    tool_name: str | None = None
    tool_call_id: Annotated[str, StringConstraints(max_length=256)] | None = None

    @field_validator("images")
    @classmethod
    def _check_images(cls, value: Any) -> Any:
        if value:
            raise unsupported("images are not supported. Leave them out.")
        return value

    @model_validator(mode="after")
    def _check_calls(self) -> OllamaMessage:
        check_call_ids(call.id for call in self.tool_calls or () if call.id)
        check_content(self, self.role, self.tool_calls)
        return self


def link_calls(messages: list[OllamaMessage]) -> list[Message]:
    """Convert messages to the server's own type.

    A result belongs to the call that its `tool_call_id` names. Most clients of this API send no
    ids. A result without an id belongs to a call of the latest message that has calls: to the
    first one that has no result yet. If `tool_name` is given, only calls of this function count.
    """
    found: list[Message] = []
    waiting: list[tuple[str, str]] = []  # the ids and names of calls without a result
    for number, message in enumerate(messages):
        calls: list[Call] = []
        for at, made in enumerate(message.tool_calls or ()):
            name, arguments = made.function.name, json.dumps(made.function.arguments)
            calls.append(Call(made.id or f"call_{number}_{at}", name, arguments))
        if calls:
            waiting = [(call.id, call.name) for call in calls]
        result = None
        if message.role == "tool":
            own = [one for one in waiting if message.tool_name in (None, one[1])]
            result = own[0][0] if own else (message.tool_name or "tool")
            result = message.tool_call_id or result
            waiting = [one for one in waiting if one[0] != result]
        found.append(Message(message.role, message.content or "", None, tuple(calls), result))
    return found


class OllamaBody(GenerationBody):
    """Fields of every request for an answer. Answers are streamed unless the client turns
    streaming off.
    """

    max_tokens: Limit | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: Any = None
    top_logprobs: Any = None
    truncate: Any = None
    shift: Any = None

    @property
    def streams(self) -> bool:
        """Whether the answer is sent while it is made."""
        return self.stream is not False

    @property
    def effort_field(self) -> str:
        """The field that says how much the model should think."""
        return "think"

    @property
    def effort(self) -> str | None:
        """How much the model should think."""
        if isinstance(self.think, bool):
            return "high" if self.think else "none"
        return self.think

    @property
    def held_to(self) -> tuple[dict[str, Any], bool] | None:
        """The schema of answers, and whether unknown keywords of the schema are refused.

        None if any text is allowed.
        """
        if not self.format:
            return None
        return ({"type": "object"}, True) if self.format == "json" else (dict(self.format), False)


class OllamaChatBody(OllamaBody):
    """Request body of `POST /api/chat`."""

    messages: ListOf[OllamaMessage] | None = None
    tools: Annotated[ListOf[AnyTool], Field(max_length=128)] | None = None

    @property
    def history(self) -> list[Message]:
        """The messages, converted to the server's own type."""
        return link_calls(self.messages or [])

    @property
    def offer(self) -> ToolOffer:
        """The tools of the request."""
        offered = [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]
        tools = [tool.function.tool() for tool in offered]
        schema = "tools[{}].function.parameters"
        return ToolOffer(tools, schema_param=schema, places=offered_places(self.tools))

    @property
    def skipped(self) -> list[str]:
        """The parts of the request that have no effect, for a warning."""
        return [*super().skipped, *skipped_tools(self.tools)]


class OllamaGenerateBody(OllamaBody):
    """Request body of `POST /api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    suffix: Annotated[Any, Only(None, "")] = None
    images: Annotated[Any, Only(None, [])] = None
    template: Annotated[Any, Only(None, "")] = None
    context: Annotated[Any, Only(None, [], instead="Use /api/chat with the messages")] = None

    @model_validator(mode="after")
    def _check_raw(self) -> OllamaGenerateBody:
        if self.raw and self.system:
            raise unsupported("a raw prompt cannot have a system message. Write it in the prompt.")
        return self

    @property
    def text(self) -> str:
        """The prompt."""
        return self.prompt or ""

    @property
    def history(self) -> list[Message]:
        """The prompt as the messages of a chat."""
        system = [Message("system", self.system)] if self.system else []
        return [*system, Message("user", self.text)]


class ShowBody(Strict):
    """Request body of `POST /api/show`."""

    model: Annotated[str, StringConstraints(max_length=512)] | None = None
    name: Annotated[str, StringConstraints(max_length=512)] | None = None
    verbose: bool | None = None
    system: Any = None
    template: Any = None
    options: Any = None
