"""Grammars that answers are held to, compiled and matched by llguidance.

A grammar is compiled in the thread that asks for it, and each answer has a matcher of its own.
Knows nothing about HTTP or rows.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.errors import shorten
from weir.serve.structured.schema_limits import BadSchema, check_schema

ANY_SPACE = r"( |\n( {0,8}|\t{0,4}))"
"""White space between two tokens of JSON: a space, or a line end and an indent.

It is bounded: a model could otherwise go on with nothing but white space.
"""
ONE_SPACE = " "
MAX_SECONDS = 0.25
"""Processor time of one mask; a grammar that takes longer is given up."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class GrammarCompiler:
    """Compiles grammars for one model."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: frozenset[int], vocabulary: int
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._size = vocabulary
        self._lock = threading.Lock()
        self._cached: LLTokenizer | None = None

    def compile_schema(
        self, schema: Mapping[str, Any], *, strict: bool
    ) -> Callable[[], GrammarConstraint]:
        """Compile a JSON schema.

        Args:
            strict: refuse keywords that are not known; otherwise they are ignored.

        Raises:
            BadSchema: it is no schema, is too large, or answers cannot be held to it.
        """
        check_schema(schema)
        grammar = {"grammars": [{"json_schema": add_guidance(schema, ANY_SPACE, strict=strict)}]}
        return self.compile(grammar)

    def compile(
        self, grammar: Mapping[str, Any], *, stop_when_complete: bool = True
    ) -> Callable[[], GrammarConstraint]:
        """Compile a grammar.

        Args:
            stop_when_complete: where the model has no token that ends an answer, end it as soon as
                the grammar accepts it.

        Returns:
            Makes the constraint of one answer.
        """
        with self._lock:  # one at a time, so that clients' grammars take up one thread at most
            began = time.thread_time()
            matcher = LLMatcher(
                self._tokens(), json.dumps(dict(grammar)), limits=_LIMITS, log_level=0
            )
            if not matcher.is_error():
                matcher.compute_bitmask()
            if matcher.is_error():
                raise BadSchema(_error_of(matcher))
            if time.thread_time() - began > 4 * MAX_SECONDS:
                raise BadSchema("it is too complex")
        tokens = max(self._size, self._tokens().vocab_size)
        eager = stop_when_complete and not self._stop_ids
        return partial(GrammarConstraint, matcher, self._size, tokens, eager=eager)

    def _tokens(self) -> LLTokenizer:
        """The tokenizer as llguidance has it, made when it is first needed: that takes a second."""
        if self._cached is None:
            try:
                stop_ids = sorted(self._stop_ids) or None
                known: Any = self._tokenizer  # a fast one, or llguidance refuses it
                self._cached = from_tokenizer(
                    known, n_vocab=max(self._size, len(known)), eos_token=stop_ids
                )
            except Exception as error:  # llguidance raises whatever it finds
                reason = shorten(str(error))
                raise BadSchema(f"this model's tokenizer has no grammars ({reason})") from None
        return self._cached


class GrammarConstraint:
    """The constraint of one answer (`weir.serve.engine.Constraint`).

    Args:
        matcher: of the grammar, at its start; it is copied.
        tokens: number of tokens that the matcher knows, which may be larger than `size`.
        eager: whether the answer is done as soon as the grammar accepts it.
    """

    def __init__(self, matcher: LLMatcher, size: int, tokens: int, *, eager: bool) -> None:
        self._matcher = matcher.deep_copy()
        self._size = size
        self._eager = eager
        self._bits = np.zeros((1, -(-tokens // 32)), np.int32)

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        matcher = self._matcher
        return matcher.is_stopped() or (self._eager and matcher.is_accepting())

    def allow(self, logits: Tensor) -> Tensor:
        """Set the logits [vocabulary] of tokens that may not come next to -inf, in place.

        Raises:
            BadSchema: the grammar has become too complex.
        """
        began = time.thread_time()
        fill_next_token_bitmask(self._matcher, self._bits)
        self._check()
        if time.thread_time() - began > MAX_SECONDS:
            raise BadSchema("what this answer must look like takes too long to work out")
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=self._size)
        return logits.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)

    def accept(self, token: int) -> None:
        """Advance by a token."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadSchema(f"the answer cannot be held to its grammar: {_error_of(self._matcher)}")


_SENTENCES = {
    "NoExtensionBias": "nothing is valid to it, as where a $ref leads to itself and nothing else",
    "LexerTooComplex": "it is too complex",
    "ParserTooComplex": "it is too complex",
}
"""Sentences for the errors of which llguidance gives a name only."""


def _error_of(matcher: LLMatcher) -> str:
    """The error of a matcher, as a sentence."""
    message = matcher.get_error().replace("<non-verbose/>", "").strip()
    return _SENTENCES.get(message) or shorten(message)


def add_guidance(schema: Mapping[str, Any], spaces: str, *, strict: bool) -> dict[str, Any]:
    """Add llguidance's options to a schema, in place of any that the client sent.

    Args:
        spaces: pattern of the white space between two tokens of JSON; must be bounded.
    """
    options = {"whitespace_pattern": spaces, "lenient": not strict}
    return {**schema, "x-guidance": options}
