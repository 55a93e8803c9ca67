"""Tokens as clients are told of them: what they say, their bytes, how likely they were."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from weir.serve.engine import SampledToken

PARTIAL = "\ufffd"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token that is one byte, where a tokenizer has such tokens for what it has no others for."""


class Tokens:
    """Tells of tokens.

    Args:
        tokenizer: of the model.
        ends: tokens that end an answer and are no part of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        # Its state is JSON; to write the whole tokenizer as such takes a second.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = None if backend is None else backend.decoder
        self._decoder = "" if decoder is None else decoder.__getstate__().decode()

    def text(self, token: int) -> str:
        """What a token says by itself."""
        return str(self._tokenizer.decode([token]))

    def chat(self, choice: SampledToken) -> dict[str, Any] | None:
        """A token with the likeliest ones, as in a chat; None for one that ends the answer."""
        if choice.logprob is None or choice.token in self._ends:
            return None
        return {
            **self._one(choice.token, choice.logprob),
            "top_logprobs": [self._one(token, logprob) for token, logprob in choice.top],
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.text(token)
        # Half a character is no text, and its bytes stand in the token as the vocabulary has it.
        own = self._bytes(token) if PARTIAL in text else list(text.encode())
        return {"token": text, "logprob": finite(logprob), "bytes": own}

    def _bytes(self, token: int) -> list[int] | None:
        """The bytes of a token that are no text; None where the tokenizer does not say them."""
        written = str(self._tokenizer.convert_ids_to_tokens(token))
        if "ByteLevel" in self._decoder and all(char in _LEVEL for char in written):
            return [_LEVEL[char] for char in written]
        if "ByteFallback" in self._decoder and (byte := _BYTE.fullmatch(written)):
            return [int(byte[1], 16)]
        return None


def _level() -> dict[str, int]:
    """The bytes that characters stand for in a byte-level vocabulary.

    A byte that Latin-1 can show stands for itself, and the others for the characters from U+0100 on
    (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners", section 2.2).
    """
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


_LEVEL = _level()


def finite(logprob: float) -> float:
    """A logarithm that JSON can hold; OpenAI's for what cannot come is -9999."""
    return max(logprob, -9999.0)
