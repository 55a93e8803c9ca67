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
from weir.models import sink_of, transformers_model
from weir.stream.answer import AnswerText
from weir.stream.stream import Stream
from weir.stream.turns import Turns


class Conversation:
    """Turns of a user and a model.

    With a chat template, each turn is the text the template adds for it. A model without one simply
    continues what was said, up to the end of a paragraph. In front of the first turn stand the
    tokens of a learnable sink, where the model has one, whatever the template says.

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
        turns = Turns(self.tokenizer, self.stream.ends)
        said = [{"role": "user", "content": text}]
        if self.stream.seen == 0:
            sink = sink_of(transformers_model(self.stream.model).config)
            return sink.first(turns.whole(said))
        after = turns.after(said, self.stream.last[0])
        return turns.whole(said) if after is None else after

    def load(self, path: str | Path) -> None:
        """Go on with a saved stream.

        Raises:
            WeirError: the file is missing, damaged or of another model.
        """
        self.stream = Stream.restore(self.stream.model, path)
