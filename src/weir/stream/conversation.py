"""A conversation over one `Stream`: only what is new is ever fed.

The history lives in the cache, not here, so a conversation of any length takes no more memory than
a short one. Knows nothing about terminals.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError
from weir.stream.answer import AnswerText
from weir.stream.stream import Stream

ANSWER = "an-answer-that-stands-for-all"
"""What the model is pretended to have said where a template is asked for the turn after."""


class Conversation:
    """Turns of a user and a model.

    With a chat template, each turn is the text the template adds for it. A model without one simply
    continues what was said, up to the end of a paragraph.

    Args:
        stream: where it takes place; a restored one goes on.
        tokenizer: of the stream's model.

    Attributes:
        rate: tokens per second of the last answer.
    """

    def __init__(self, stream: Stream, tokenizer: PreTrainedTokenizerBase) -> None:
        self.stream = stream
        self.tokenizer = tokenizer
        self.rate = 0.0

    def say(self, text: str, *, max_new_tokens: int = 256, **sampling: Any) -> Iterator[str]:
        """Feed the user's words and yield the answer piece by piece.

        Closing the iterator at any point leaves the stream whole.

        Args:
            text: what the user says.
            max_new_tokens: of the answer; at most so many.
            sampling: temperature, top_k, top_p, as for `Stream.generate`.

        Raises:
            WeirError: the text makes no tokens, or cannot be written in UTF-8.
        """
        ids = self.turn(text)
        if not ids:
            raise WeirError("that makes no tokens; say something")
        self.stream.feed(ids)
        self.rate = 0.0
        # Without a template the model does not end its turn: the paragraph is the answer.
        answer = AnswerText(self.tokenizer, ["\n"] if self.tokenizer.chat_template is None else [])
        ends, began = self.stream.ends, time.perf_counter()
        tokens = self.stream.generate(max_new_tokens, **sampling)
        for count, token in enumerate(tokens, 1):
            self.rate = count / (time.perf_counter() - began)
            if token in ends:
                return
            if new := answer.add(token):
                yield new
            if answer.stopped:
                return

    def turn(self, text: str) -> list[int]:
        """The ids of one turn of the user, and of what makes the model answer.

        Raises:
            WeirError: the text cannot be written in UTF-8.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise WeirError(f"character {error.start + 1} of that is not UTF-8") from None
        first = self.stream.seen == 0
        if self.tokenizer.chat_template is None:
            ended = first or str(self.tokenizer.decode(self.stream.last)).endswith("\n")
            ids = self.tokenizer(text if ended else f"\n{text}", add_special_tokens=first)
            return list(ids["input_ids"])
        user = {"role": "user", "content": text}
        if first:
            return self._encode(self._render([user]))
        # What comes after an answer does not depend on the turns before it: a short pretended
        # history stands for the real one, however long that is.
        history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ANSWER}]
        _, found, after = self._render([*history, user]).partition(ANSWER)
        if not found:
            return self._encode(self._render([user]))
        return self._without_end(self._encode(after))

    def _without_end(self, ids: list[int]) -> list[int]:
        """A turn without the end of the answer before it, if the model has said that itself."""
        ends = self.stream.ends
        place = next((i for i, token in enumerate(ids) if token in ends), None)
        if place is None or self.stream.last[0] not in ends:
            return ids
        between = str(self.tokenizer.decode(ids[:place]))
        return ids if between.strip() else ids[place + 1 :]

    def _render(self, turns: list[dict[str, str]]) -> str:
        return str(
            self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        )

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def load(self, path: str | Path) -> None:
        """Go on with a saved stream.

        Raises:
            WeirError: the file is missing, damaged or of another model.
        """
        self.stream = Stream.restore(self.stream.model, path)
