"""What is said to a model, as ids: a whole conversation, or only what comes after an answer.

Templates rewrite the past and tokenizers write a text otherwise than a model said it, so what was
fed is never rendered again: only what is new is. Knows nothing about streams.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError, shorten

ANSWER = "an-answer-that-stands-for-all"
"""What the model is pretended to have said where a template is asked for the turn after."""

SYSTEM = ("system", "developer")
"""Roles whose messages say how all others are to be answered."""


class ChatTemplate:
    """Renders turns of a conversation for one model.

    With a chat template, a turn is the text that the template adds for it. A model without one
    continues a text: that of all messages, each in a line of its own.

    Args:
        tokenizer: of the model.
        ends: the tokens that end an answer.
        tools: functions that the template is to tell the model of, as JSON schemas.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        ends: Collection[int],
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(ends)
        self._tools = tools

    def with_tools(self, tools: Sequence[dict[str, Any]]) -> ChatTemplate:
        """The same for a conversation with tools."""
        return ChatTemplate(self._tokenizer, self._ends, tools)

    @property
    def templated(self) -> bool:
        """Whether the model has a chat template."""
        return self._tokenizer.chat_template is not None

    def whole(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """The ids of a conversation from its beginning, up to where the model is to answer.

        Args:
            messages: each with its "role" and "content".

        Raises:
            WeirError: the template refuses them.
        """
        if not self.templated:
            text = "\n".join(message["content"] for message in messages)
            return list(self._tokenizer(text)["input_ids"])
        return self._encode(render_chat(self._tokenizer, messages, tools=self._tools))

    def after(self, messages: Sequence[dict[str, Any]], last: int | None) -> list[int] | None:
        """The ids of messages that come after an answer, up to where the model is to answer again.

        Args:
            messages: as for `whole`.
            last: the last token of the answer before them; None where it is not known.

        Returns:
            None where the template hides earlier answers, so that nothing can be gone on with.

        Raises:
            WeirError: the template refuses them.
        """
        if not self.templated:
            text = "\n".join(message["content"] for message in messages)
            said = [] if last is None else [last]
            ended = str(self._tokenizer.decode(said)).endswith("\n")
            return self._encode(text if ended else f"\n{text}")
        # What comes after an answer does not depend on the turns before it: a short pretended
        # history stands for the real one, however long that is.
        history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}]
        text = render_chat(self._tokenizer, [*history, *messages], tools=self._tools)
        _, found, after = text.partition(ANSWER)
        return self._without_end(self._encode(after), last) if found else None

    def beginning(self, messages: Sequence[dict[str, Any]], ids: Sequence[int]) -> int:
        """How many ids of a conversation come before the first words that are not the system's.

        Those are the start token, the system turn, the tools it names, and what the template puts
        in front of a user's words.

        Args:
            messages: as for `whole`.
            ids: what `whole` made of them.
        """
        first = next((i for i, it in enumerate(messages) if it["role"] not in SYSTEM), None)
        words = "" if first is None else messages[first]["content"] or ""
        # The same conversation with other words: what both begin with is not the words'.
        other = {"role": "user", "content": "x" if words.lstrip().startswith("0") else "0"}
        try:
            return _alike(ids, self.whole([*messages[:first], other]))
        except WeirError:
            return 0  # nobody knows, where a template does not take a system turn and a user's

    def header(self, ids: Sequence[int]) -> int:
        """How many of the last ids are what the template puts between last words and an answer.

        Args:
            ids: from `whole` or `after`.
        """
        return _alike(ids[::-1], self._header[::-1])

    @cached_property
    def _header(self) -> list[int]:
        if not self.templated:
            return []
        try:
            text = render_chat(self._tokenizer, [{"role": "user", "content": ANSWER}])
        except WeirError:
            return []
        return self._encode(text.partition(ANSWER)[2])

    def _without_end(self, ids: list[int], last: int | None) -> list[int]:
        """A turn without the end of the answer before it, if the model has said that itself."""
        place = next((i for i, token in enumerate(ids) if token in self._ends), None)
        if place is None or last not in self._ends:
            return ids
        between = str(self._tokenizer.decode(ids[:place]))
        return ids if between.strip() else ids[place + 1 :]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _alike(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many ids two lists begin with alike."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ids), len(others)))


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[dict[str, Any]] = (),
) -> str:
    """A conversation as the text that a model's chat template makes of it.

    Args:
        tokenizer: of the model; it has a template.
        turns: each with its "role" and "content".
        add_generation_prompt: end where the model is to answer; otherwise the last turn is left
            open, to be gone on with.
        tools: functions that the model is told of, as JSON schemas.

    Raises:
        WeirError: the template refuses them, as those do that want roles to alternate.
    """
    try:
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
    return str(text)
