"""Rendering of messages into tokens: chat template, start token, and format of tool calls.

Knows nothing about owners, sessions or rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.models import ModelSink
from weir.serve.messages import Message
from weir.serve.tools import CallFormat, Tool, format_of
from weir.stream import ChatTemplate, PromptEncoder, PromptTooLong


@dataclass(frozen=True)
class RenderedPrompt:
    """Messages as tokens.

    Attributes:
        beginning: how many of them are the conversation's beginning, where they start one.
        header: how many at their end are the header of the answer to come.
    """

    ids: list[int]
    beginning: int = 0
    header: int = 0


class PromptRenderer:
    """Renders messages for one model. Called from any thread.

    Args:
        most: tokens that a prompt may have; None for any number.

    Raises:
        WeirError: the model's chat template fails, or does not come to an end.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: frozenset[int],
        sink: ModelSink,
        most: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer, most)
        self._template = ChatTemplate(tokenizer, stop_ids, encoder=self._encoder)
        self._sink = sink
        try:
            self._call_format: CallFormat | WeirError = format_of(tokenizer)
        except WeirError as error:
            self._call_format = error
        # A tokenizer prints its warning about padding in the first call: now, before any thread.
        tokenizer("x")
        self._template.header([])  # a template that is broken is better known now

    @property
    def is_line_based(self) -> bool:
        """Whether a message is a line of its own: the model has no chat template."""
        return not self._template.templated

    @property
    def call_format(self) -> CallFormat:
        """The format in which the model writes tool calls.

        Raises:
            WeirError: it is not known.
        """
        if isinstance(self._call_format, WeirError):
            raise WeirError(str(self._call_format))
        return self._call_format

    @property
    def call_tokens(self) -> dict[str, int]:
        """The texts around a call that are special tokens, with their ids."""
        known = self._tokenizer.added_tokens_decoder.items()
        special = {token.content: number for number, token in known if token.special}
        form = self.call_format
        around = (form.trigger, form.between, form.close)
        return {text: special[text] for text in around if text in special}

    def render_text(self, text: str) -> list[int]:
        """Tokenize a text as it is."""
        return self._sink.first(self._encoder.encode(text, special=True))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> RenderedPrompt:
        """Render a conversation from its beginning.

        Raises:
            WeirError: the template refuses it.
        """
        rendered, described = self._for_template(messages, tools)
        template = self._template.with_tools(described)
        ids = template.whole(rendered)
        beginning, header = template.beginning(rendered, ids), self._template.header(ids)
        with_sink = self._sink.first(ids)
        return RenderedPrompt(with_sink, beginning + len(with_sink) - len(ids), header)

    def render_next(
        self, messages: Sequence[Message], last: int, tools: Sequence[Tool]
    ) -> RenderedPrompt | None:
        """Render what follows an answer.

        Args:
            last: the last token of the answer.

        Returns:
            None if the template cannot render these messages without those before.
        """
        # Where a system message describes the tools, that was said at the beginning.
        in_template = isinstance(self._call_format, CallFormat) and self._call_format.in_template
        rendered, described = self._for_template(messages, tools if in_template else ())
        try:
            ids = self._template.with_tools(described).after(rendered, last)
            return RenderedPrompt(ids, header=self._template.header(ids)) if ids else None
        except PromptTooLong:
            raise
        except WeirError:
            return None  # the template looks at more of the history than is here

    def _for_template(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Messages and tools as the template takes them."""
        if isinstance(self._call_format, WeirError):
            return [message.for_template() for message in messages], []
        return self._call_format.for_template(messages, tools)
