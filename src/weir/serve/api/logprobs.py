"""Log-probabilities of tokens as clients read them: text, bytes and logarithm of each."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from weir.serve.engine.output import AnswerEvent, TokenEvent
from weir.serve.engine.sampler import SampledToken

REPLACEMENT = "\ufffd"
"""Stands in a decoded token for bytes that are no whole character."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token that is one byte, in tokenizers that fall back to bytes."""


class LogprobFormatter:
    """Formats sampled tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        # The state of the decoder alone is JSON; to write the whole tokenizer takes a second.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = None if backend is None else backend.decoder
        self._decoder = "" if decoder is None else decoder.__getstate__().decode()

    def text(self, token: int) -> str:
        """A token decoded by itself."""
        return str(self._tokenizer.decode([token]))

    def entries_of(self, event: AnswerEvent) -> list[dict[str, Any]]:
        """The entries of an event's token; none if it has no token, or nobody asked for them."""
        return self.entries(event.token) if isinstance(event, TokenEvent) else []

    def entries(self, token: SampledToken) -> list[dict[str, Any]]:
        """A token with the most likely ones beside it; none for one that ends the answer."""
        if token.logprob is None or token.id in self._stop_ids:
            return []
        top = [self._entry(other, logprob) for other, logprob in token.top]
        return [{**self._entry(token.id, token.logprob), "top_logprobs": top}]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        # The bytes of a part of a character are told by the token's name in the vocabulary.
        found = self._bytes(token) if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": clip(logprob), "bytes": found}

    def _bytes(self, token: int) -> list[int] | None:
        """The bytes of a token that is no text; None if its name does not tell them."""
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        if "ByteLevel" in self._decoder and all(char in _BYTE_LEVEL for char in name):
            return [_BYTE_LEVEL[char] for char in name]
        if "ByteFallback" in self._decoder and (byte := _BYTE.fullmatch(name)):
            return [int(byte[1], 16)]
        return None


_BYTE_LEVEL = {char: byte for byte, char in bytes_to_unicode().items()}
"""The bytes that characters stand for in a byte-level vocabulary."""


def clip(logprob: float) -> float:
    """A logarithm that JSON can hold; OpenAI writes -9999 for what cannot come."""
    return max(logprob, -9999.0)
