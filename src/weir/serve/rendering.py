"""How what is said becomes tokens of one model: its template, its start token, its form of calls.

Knows nothing about owners, turns or rows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.models import ModelSink
from weir.serve.messages import Message
from weir.serve.tools import CallFormat, Tool, form_of
from weir.stream import ChatTemplate


@dataclass(frozen=True)
class RenderedPrompt:
    """Messages as tokens.

    Attributes:
        ids: to be read.
        beginning: how many of them are the conversation's beginning, where they are all of it.
        header: how many of the last of them the template puts in front of the answer.
    """

    ids: list[int]
    beginning: int = 0
    header: int = 0


class PromptRenderer:
    """Words what is said to one model; called from any thread.

    Args:
        tokenizer: of the model.
        ends: tokens that end an answer.
        sink: the start token that the model was trained with.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], sink: ModelSink
    ) -> None:
        self._tokenizer = tokenizer
        self._turns = ChatTemplate(tokenizer, ends)
        self._sink = sink
        self._form = _form_of(tokenizer)
        self._alone = threading.Lock()
        # The first call puts out what a tokenizer's file says of padding; no thread decodes yet.
        tokenizer("x")

    @property
    def lines(self) -> bool:
        """Whether a message is a line of its own: where the model has no chat template."""
        return not self._turns.templated

    @property
    def form(self) -> CallFormat:
        """The form in which the model writes calls.

        Raises:
            WeirError: it is not known.
        """
        if isinstance(self._form, WeirError):
            raise WeirError(str(self._form))
        return self._form

    @property
    def special(self) -> dict[str, int]:
        """The texts around a call that are special tokens, which an answer has no others of."""
        known = self._tokenizer.added_tokens_decoder.items()
        texts = {token.content: number for number, token in known if token.special}
        form = self.form
        around = (form.trigger, form.between, form.close)
        return {text: texts[text] for text in around if text in texts}

    def text(self, text: str) -> list[int]:
        """A text as it is."""
        with self._alone:
            return self._sink.first(self._tokenizer(text)["input_ids"])

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool]) -> RenderedPrompt:
        """A conversation from its beginning.

        Raises:
            WeirError: the template refuses it.
        """
        rendered, told = self._rendered(messages, tools)
        turns = self._turns.with_tools(told)
        with self._alone:
            said = turns.whole(rendered)
            beginning, header = turns.beginning(rendered, said), self._turns.header(said)
        ids = self._sink.first(said)
        return RenderedPrompt(ids, beginning + len(ids) - len(said), header)

    def after(
        self, messages: Sequence[Message], last: int, tools: Sequence[Tool]
    ) -> RenderedPrompt | None:
        """What comes after an answer.

        Args:
            messages: what is new.
            last: the last token of the answer.
            tools: as they were told at the beginning.

        Returns:
            None where it can only be told with what was before.
        """
        # Where a system turn describes the tools, that was said at the beginning.
        known = isinstance(self._form, CallFormat) and self._form.told
        said, told = self._rendered(messages, tools if known else ())
        try:
            with self._alone:
                ids = self._turns.with_tools(told).after(said, last)
                return RenderedPrompt(ids, header=self._turns.header(ids)) if ids else None
        except WeirError:
            return None  # a template that wants more of a history than stands for it here

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Messages and tools as the template takes them."""
        if isinstance(self._form, WeirError):
            return [message.for_template() for message in messages], []
        return self._form.rendered(messages, tools)


def _form_of(tokenizer: PreTrainedTokenizerBase) -> CallFormat | WeirError:
    """The form of a model's calls, or why there is none."""
    try:
        return form_of(tokenizer)
    except WeirError as error:
        return error
