"""Tokens as clients are told of them: what they say, their bytes, how likely they were."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from weir.serve.choosing import Choice

PARTIAL = "\ufffd"


class Tokens:
    """Tells of tokens.

    Args:
        tokenizer: of the model.
        ends: tokens that end an answer and are no part of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = ends

    def text(self, token: int) -> str:
        """What a token says by itself."""
        return str(self._tokenizer.decode([token]))

    def chat(self, choice: Choice) -> dict[str, Any] | None:
        """A token with the likeliest ones, as in a chat; None for one that ends the answer."""
        if choice.logprob is None or choice.token in self._ends:
            return None
        return {
            **self._one(choice.token, choice.logprob),
            "top_logprobs": [self._one(token, logprob) for token, logprob in choice.top],
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        # Half a character is no text, and a tokenizer does not say which bytes it has.
        own = None if PARTIAL in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": own}


def finite(logprob: float) -> float:
    """A logarithm that JSON can hold; OpenAI's for what cannot come is -9999."""
    return max(logprob, -9999.0)
