"""Log-probabilities of tokens for clients: the text, bytes and log-probability of each."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from weir.serve.engine.output import AnswerEvent, TokenEvent
from weir.serve.engine.sampler import SampledToken

REPLACEMENT = "\ufffd"
"""Replaces bytes in a decoded token that are not a whole character."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token for a single byte, in tokenizers that fall back to bytes."""


class LogprobFormatter:
    """Formats sampled tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        # Only the decoder's state is needed, as JSON. Serializing the whole tokenizer takes a
        # second.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = None if backend is None else backend.decoder
        self._decoder = "" if decoder is None else decoder.__getstate__().decode()

    def text(self, token: int) -> str:
        """Return a token decoded alone."""
        return str(self._tokenizer.decode([token]))

    def entries_of(self, event: AnswerEvent) -> list[dict[str, Any]]:
        """Return the `entries` of an event's token. Empty if the event has no token."""
        return self.entries(event.token) if isinstance(event, TokenEvent) else []

    def entries(self, token: SampledToken) -> list[dict[str, Any]]:
        """Return a list with the entry of a token and, in it, the most likely tokens. Empty if no
        log-probabilities were asked for, or if the token ends the answer.
        """
        if token.logprob is None or token.id in self._stop_ids:
            return []
        top = [self._entry(other, logprob) for other, logprob in token.top]
        return [{**self._entry(token.id, token.logprob), "top_logprobs": top}]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        # The bytes of a partial character are found by the token's name in the vocabulary.
        found = self._bytes(token) if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": clip(logprob), "bytes": found}

    def _bytes(self, token: int) -> list[int] | None:
        """Return the bytes of a token that is not text, or None if its name does not say."""
        name = str(self._tokenizer.convert_ids_to_tokens(token))
        if "ByteLevel" in self._decoder and all(char in _BYTE_LEVEL for char in name):
            return [_BYTE_LEVEL[char] for char in name]
        if "ByteFallback" in self._decoder and (byte := _BYTE.fullmatch(name)):
            return [int(byte[1], 16)]
        return None


_BYTE_LEVEL = {char: byte for byte, char in bytes_to_unicode().items()}
"""The byte for each character of a byte-level vocabulary."""


def clip(logprob: float) -> float:
    """Limit a logarithm to a number that JSON can hold. OpenAI writes -9999 for impossible
    tokens.
    """
    return max(logprob, -9999.0)
