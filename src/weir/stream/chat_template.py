"""Chat templates: the ids of a whole conversation, or of the messages after an answer.

Templates rewrite earlier messages, and a tokenizer may split a text into other tokens than the
model generated. So only new messages are rendered, never tokens that were fed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import FrameType
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError, shorten
from weir.stream.encoding import PromptEncoder

ANSWER = "an-answer-that-stands-for-all"
"""A made-up answer, to render the turn that comes after any answer."""

SYSTEM = ("system", "developer")
"""Roles of instructions, which come before the conversation."""
TRUSTED = (*SYSTEM, "assistant")
"""Roles whose texts may have tokens such as `<think>`, but no control tokens."""
MAX_STEPS = 10_000_000
"""Lines of a compiled template, and calls, that rendering may take: a few for each message."""
MAX_SECONDS = 10.0
"""Seconds of a processor that it may take."""


class BrokenTemplate(WeirError):
    """A chat template fails or does not come to an end, whatever the messages are."""


class ChatTemplate:
    """Renders messages of a conversation as ids for one model.

    A model without a chat template continues the text of all messages, each on a line of its own.

    Args:
        ends: the tokens that end an answer.
        tools: functions that the model may call, as JSON schemas.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Collection[int],
        tools: Sequence[dict[str, Any]] = (),
        encoder: PromptEncoder | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._tools = tools
        self._encoder = encoder or PromptEncoder(tokenizer)

    def with_tools(self, tools: Sequence[dict[str, Any]]) -> ChatTemplate:
        """Return the same template for a conversation with tools."""
        return ChatTemplate(self._tokenizer, self._ends, tools, self._encoder)

    @property
    def templated(self) -> bool:
        """Whether the model has a chat template."""
        return self._tokenizer.chat_template is not None

    def whole(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Render messages, each with "role" and "content", from the beginning up to the model's
        answer.

        Raises WeirError if the template refuses them.
        """
        if not self.templated:
            return self._encoder.encode(self._lines(messages), special=True)
        return self._encoder.encode(self._render(messages))

    def after(self, messages: Sequence[dict[str, Any]], last: int | None) -> list[int] | None:
        """Render messages that come after an answer, whose last token is `last`, up to the next
        answer.

        Returns None if the template hides earlier answers, so that none can be continued; raises
        WeirError if it refuses the messages.
        """
        if not self.templated:
            text = self._lines(messages)
            said = [] if last is None else [last]
            ended = str(self._tokenizer.decode(said)).endswith("\n")
            return self._encoder.encode(text if ended else f"\n{text}")
        # What comes after an answer does not depend on the turns before it, so a short made-up
        # history takes the place of the real one.
        history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}]
        _, found, after = self._render([*history, *messages]).partition(ANSWER)
        return self._drop_end(self._encoder.encode(after), last) if found else None

    def beginning(self, messages: Sequence[dict[str, Any]], ids: Sequence[int]) -> int:
        """Count the ids of a conversation (`whole`) before the first words that are not
        instructions: the start token, the system turn, the tools, and the template's tokens in
        front of a user's words.
        """
        roles = [message["role"] for message in messages]
        first = next((i for i, role in enumerate(roles) if role not in SYSTEM), None)
        words = "" if first is None else messages[first]["content"] or ""
        # The ids that it shares with the same conversation in other words are not of the words.
        other = {"role": "user", "content": "x" if words.lstrip().startswith("0") else "0"}
        try:
            return _count_common(ids, self.whole([*messages[:first], other]))
        except WeirError:
            return 0  # not known: the template does not take a system turn and a user's

    def header(self, ids: Sequence[int]) -> int:
        """Count the last ids that the template puts between the last words and an answer."""
        return _count_common(ids[::-1], self._header[::-1])

    @cached_property
    def _header(self) -> list[int]:
        if not self.templated:
            return []
        try:
            text = render_chat(self._tokenizer, [{"role": "user", "content": ANSWER}])
        except BrokenTemplate:
            raise
        except WeirError:
            return []
        return self._encoder.encode(text.partition(ANSWER)[2])

    def _drop_end(self, ids: list[int], last: int | None) -> list[int]:
        """Drop the end of the answer before a turn, if the model has generated it itself."""
        place = next((i for i, token in enumerate(ids) if token in self._ends), None)
        if place is None or last not in self._ends:
            return ids
        between = str(self._tokenizer.decode(ids[:place]))
        return ids if between.strip() else ids[place + 1 :]

    def _render(self, messages: Sequence[dict[str, Any]]) -> str:
        mark = self._encoder.mark
        marked = [
            {**mark(one, trusted=one["role"] in TRUSTED), "role": one["role"]} for one in messages
        ]
        return render_chat(self._tokenizer, marked, tools=mark(list(self._tools)))

    def _lines(self, messages: Sequence[dict[str, Any]]) -> str:
        return "\n".join(self._encoder.mark(message["content"]) for message in messages)


def _count_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """Count the ids that two lists have in common at their beginning."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ids), len(others)))


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[dict[str, Any]] = (),
) -> str:
    """Render a conversation as text with a model's chat template.

    Without `add_generation_prompt` the last turn is left open, to be continued.

    Raises:
        WeirError: the template refuses the turns, as those do that want roles to alternate.
        BrokenTemplate: the template fails, or does not come to an end.
    """
    name = tokenizer.name_or_path or "this model"
    try:
        with _bounded():
            text = tokenizer.apply_chat_template(
                list(turns),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
    except TemplateError as error:
        why = shorten(str(error))
        raise WeirError(f"the model's chat template refuses these messages: {why}") from None
    except _TooManySteps:
        raise BrokenTemplate(
            f"the chat template of {name} does not come to an end: it was stopped after "
            f"{MAX_STEPS:,} steps or {MAX_SECONDS:g} seconds; give the model another"
        ) from None
    except Exception as error:
        why = shorten(f"{type(error).__name__}: {error}")
        raise BrokenTemplate(f"the chat template of {name} fails with {why}") from None
    return str(text)


class _TooManySteps(Exception):
    """Something has taken too many steps."""


@contextmanager
def _bounded() -> Iterator[None]:
    """Stop a template that is rendered in this thread after too many steps, or too long."""
    steps, until = 0, time.thread_time() + MAX_SECONDS

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS or (not steps % 1000 and time.thread_time() > until):
            raise _TooManySteps
        return trace if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
