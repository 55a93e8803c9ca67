"""A chat request in the server's own form, for all protocols.

Each protocol has a separate file that turns a body into a `ChatRequest` and writes answers in its
format. The rules for requests and the way to an answer are here, the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from weir.serve.api.dependencies import run_in_thread
from weir.serve.api.errors import APIError
from weir.serve.api.generation import Renderer, make_request, send_answers
from weir.serve.api.items import (
    cannot_pin,
    check_drops,
    check_pins,
    check_recall,
    refuse_marks,
    unknown_output,
)
from weir.serve.api.models import check_model
from weir.serve.api.output_format import add_constraint, add_own_tools, check_tools
from weir.serve.api.requests import named_session
from weir.serve.api.schemas.chat import GenerationBody
from weir.serve.api.schemas.formats import ToolOffer
from weir.serve.api.thinking import find_variables
from weir.serve.client import EngineClient, Generation
from weir.serve.engine.output import AnswerEvent, FinishEvent, RoundEvent
from weir.serve.messages import Message, StrayResult, link_results
from weir.serve.pins import CannotPin
from weir.serve.prompts import Prompt, Tell, UnknownOutput
from weir.serve.thoughts import ThoughtDelta, ThoughtParser
from weir.serve.tools.formats import Tool
from weir.serve.tools.parser import AnswerPart, TextDelta
from weir.serve.worker import Handle


@dataclass(frozen=True)
class ChatRequest:
    """A chat request.

    Attributes:
        body: the model's name and the sampling parameters.
        messages: the history, or a handle of the worker that holds it.
        offer: the tools that the client offers.
        limit: the field with the maximum number of tokens of an answer, and its value.
        logprobs: number of most likely tokens to report with each token of an answer; None for no
            log-probabilities.
        held_to: the schema of answers, and whether unknown keywords are refused; None for text.
        schema_param: the field with that schema.
    """

    body: GenerationBody
    messages: Sequence[Message] | Handle
    offer: ToolOffer
    limit: tuple[str, int | None]
    logprobs: int | None = None
    held_to: tuple[dict[str, Any], bool] | None = None
    schema_param: str = "response_format.json_schema.schema"


async def answer_chat(
    http: Request,
    client: EngineClient,
    owner: str,
    chat: ChatRequest,
    make_renderer: Callable[[Generation], Renderer],
) -> Response:
    """Answer a chat. Only messages that are new since a saved turn are processed."""
    offer = add_own_tools(client, chat.body, chat.offer)
    match, variables = _make_match(http, client, owner, chat, offer)
    default = client.limits.answer_default
    job = make_request(client, chat.body, match, chat.limit, chat.logprobs, default)
    job = await add_constraint(http, chat.held_to, offer, job, chat.schema_param, variables)
    return await send_answers(http, job, "messages", make_renderer, chat.body, always_named=True)


async def count_chat(http: Request, client: EngineClient, owner: str, chat: ChatRequest) -> int:
    """Count the tokens of a chat before its answer."""
    refuse_marks(chat.body, "a count", "the request for the answer")
    offer = add_own_tools(client, chat.body, chat.offer)
    match, _ = _make_match(http, client, owner, chat, offer)
    prompt = await run_in_thread(match, param="messages")
    return prompt.length


def _make_match(
    http: Request, client: EngineClient, owner: str, chat: ChatRequest, offer: ToolOffer
) -> tuple[Callable[[], Prompt], Mapping[str, Any]]:
    """Check a chat.

    Returns the function that finds its prompt, and further variables of the chat template.
    """
    session = named_session(http)
    check_model(client, chat.body.model)
    check_tools(client, offer)
    variables = find_variables(client, chat.body)
    drops, pins = check_drops(client, chat.body), check_pins(client, chat.body)
    tell = client.tell_forgotten if chat.body.tells_forgotten else None
    recall = check_recall(client, chat.body)
    how = (owner, session, offer.tools, variables, drops, tell, recall, pins)
    match = partial(_match, client, chat.messages, *how)
    return match, variables


def _match(
    client: EngineClient,
    messages: Sequence[Message] | Handle,
    owner: str,
    session: str | None,
    tools: Sequence[Tool],
    variables: Mapping[str, Any],
    drops: Sequence[str],
    tell: Tell | None,
    recall: int,
    pins: Sequence[str],
) -> Prompt:
    """Find the prompt of a chat."""
    held = messages if isinstance(messages, Handle) else client.matcher.hold(messages)
    try:
        how = (session, tools, variables, drops, tell, recall, pins)
        return client.matcher.match(owner, held.map(_link), *how)
    except UnknownOutput as error:
        raise unknown_output(error) from None
    except CannotPin as error:
        raise cannot_pin(error) from None


def _link(_: Any, messages: Sequence[Message]) -> Sequence[Message]:
    """Link the tool results of a chat with their calls.

    Raises APIError if a result has no call, or if the chat ends neither with a message to answer
    nor with the beginning of the answer.
    """
    try:
        linked = link_results(messages)
    except StrayResult as error:
        param = f"messages[{error.number}].tool_call_id"
        raise APIError(400, str(error), param=param) from None
    last = linked[-1]
    if last.role == "assistant" and (
        last.calls or len(linked) == 1 or linked[-2].role == "assistant"
    ):
        raise APIError(
            400,
            "the last message cannot be answered. End with a message whose role is not assistant. "
            "To begin the answer yourself, add one assistant message without tool calls after it.",
            param="messages",
        )
    return linked


def make_thoughts(client: EngineClient, generation: Generation) -> ThoughtParser | None:
    """Make a parser for the thoughts in one answer. None if the model has no thoughts."""
    if not client.renderer.thinks:
        return None
    return ThoughtParser(is_open=client.renderer.opens_thoughts(generation.prompt))


class AnswerReader:
    """Splits one answer into thoughts, text, and tool calls."""

    def __init__(self, client: EngineClient, generation: Generation) -> None:
        self._calls = client.make_parser(generation.request)
        self._thoughts = make_thoughts(client, generation)

    @property
    def has_tools(self) -> bool:
        """Whether there are tools that the answer may call."""
        return self._calls is not None

    @property
    def called(self) -> bool:
        """Whether the answer contains a complete call."""
        return self._calls is not None and self._calls.num_complete > 0

    def read(self, event: AnswerEvent) -> list[AnswerPart | ThoughtDelta]:
        """Return the parts in an event."""
        ends = isinstance(event, FinishEvent | RoundEvent)
        thought, text = "", event.text
        if self._thoughts is not None:
            thought, text = self._thoughts.feed(event.text)
            if ends:
                more, rest = self._thoughts.finish()
                thought, text = thought + more, text + rest
        parts: list[AnswerPart | ThoughtDelta] = [ThoughtDelta(thought)] if thought else []
        if self._calls is None:
            return [*parts, TextDelta(text)] if text else parts
        parts += self._calls.feed(text)
        if isinstance(event, RoundEvent):
            parts += self._calls.next_round()
            if self._thoughts is not None:
                self._thoughts = ThoughtParser(is_open=event.opens_thoughts)
        if isinstance(event, FinishEvent):
            parts += self._calls.finish(cut=event.reason == "length")
        return parts

    def finish_reason(self, end: FinishEvent) -> str:
        """Return why the answer ended, in the words of OpenAI's chat API."""
        return "tool_calls" if self.called and end.reason == "stop" else end.reason
