"""Answers that may begin with thoughts, which can be any text, and must then follow a grammar.

This file does not use HTTP or rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.serve.thoughts import CLOSE, OPEN

if TYPE_CHECKING:
    from weir.serve.structured import GrammarConstraint

_NO_SPACE = "[^\\s\u0120\u010a\u010d\u0109\u2581]"
"""Pattern of a character that is not white space, in tokens as vocabularies spell them: with
characters such as "\u0120" or "\u2581" for white space.
"""
_GOES_ON = re.compile(f">.*{_NO_SPACE}", re.DOTALL)


class ThoughtTokens:
    """The tokens that an `AfterThoughts` treats separately, looked up on first use."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: Collection[int], vocabulary: int
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self.stop_ids = sorted(token for token in stop_ids if token < vocabulary)

    @cached_property
    def opening(self) -> list[int]:
        """The tokens of `<think>`."""
        return list(self._tokenizer(OPEN, add_special_tokens=False)["input_ids"])

    @cached_property
    def spaces(self) -> list[int]:
        """Tokens that models write between the thoughts and the answer."""
        texts = ("\n", "\n\n")
        found = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        return [ids[0] for ids in found if len(ids) == 1]

    @cached_property
    def going_on(self) -> Tensor:
        """Tokens that could both end the thoughts and begin the answer.

        The grammar would not see the beginning of the answer in such a token.
        """
        count = min(self._vocabulary, len(self._tokenizer))
        tokens = self._tokenizer.convert_ids_to_tokens(list(range(count)))
        found = [n for n, token in enumerate(tokens) if token and _GOES_ON.search(token)]
        special = set(self._tokenizer.all_special_ids)
        return torch.tensor([n for n in found if n not in special], dtype=torch.int64)

    def decode(self, ids: list[int]) -> str:
        """Decode some tokens to text."""
        return str(self._tokenizer.decode(ids))


class AfterThoughts:
    """The grammar that one answer must follow after its thoughts.

    An answer may begin with thoughts, but need not. Thoughts end with `</think>`, and an answer
    that has thoughts cannot end before that.

    Args:
        inner: the grammar of what follows the thoughts.
        tokens: the tokens of the model that are treated separately.
        is_open: whether the prompt has already opened the thoughts.
    """

    def __init__(self, inner: GrammarConstraint, tokens: ThoughtTokens, *, is_open: bool) -> None:
        self._inner = inner
        self._tokens = tokens
        # The part of `<think>` that is still missing.
        self._opening = None if is_open else list(tokens.opening)
        self._state = "thoughts" if is_open else "start"
        self._recent: list[int] = []  # the newest tokens of the thoughts

    @property
    def done(self) -> bool:
        """Return whether the answer is complete."""
        return self._state in ("start", "answer") and self._inner.done

    def allow(self, logits: Tensor) -> Tensor:
        """Set the logits [vocabulary] of tokens that are not allowed next to -inf, in place."""
        tokens = self._tokens
        if self._state == "opening":
            assert self._opening
            kept = logits[self._opening[0]].clone()
            logits.fill_(-torch.inf)
            logits[self._opening[0]] = kept
            return logits
        if self._state == "thoughts":
            logits[tokens.stop_ids] = -torch.inf
            logits[tokens.going_on] = -torch.inf
            return logits
        extra: list[int] = []
        if self._state == "start":
            extra = tokens.opening[:1]
        elif self._state == "after":
            extra = tokens.spaces
        kept = logits[extra].clone()
        logits = self._inner.allow(logits)
        logits[extra] = kept
        return logits

    def accept(self, token: int) -> None:
        """Advance by a token."""
        if self._state == "start":
            opens = self._opening and token == self._opening[0]
            self._state = "opening" if opens else "answer"
        if self._state == "opening":
            assert self._opening is not None
            self._opening.pop(0)
            self._state = "opening" if self._opening else "thoughts"
            return
        if self._state == "thoughts":
            self._recent = [*self._recent[1 - len(CLOSE) * 2 :], token]
            if CLOSE in self._tokens.decode(self._recent):
                self._state = "after"
            return
        if self._state == "after":
            self._state = "answer"
            if token in self._tokens.spaces:
                return
        self._inner.accept(token)
