"""Grammars, and what they let a model say next; llguidance does the work.

A grammar is compiled in whatever thread asks for it, and each answer has a matcher of its own, so
that nobody's grammar is another's business. Knows nothing about HTTP or rows.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
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

SPACES = r"( |\n( {0,8}|\t{0,4}))"
"""What may stand between two parts of JSON: a space, or a line's end and where the next begins.

The same may stand anywhere, before a colon too, so that a model that likes blanks gets few.
"""
ONE_SPACE = " "
SLOW = 0.25
"""Seconds of one mask, of the processor's; a grammar that takes longer is given up."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class Grammars:
    """Makes grammars for one model.

    Args:
        tokenizer: of the model.
        ends: tokens that end an answer.
        vocabulary: how many logits the model has.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, ends: frozenset[int], vocabulary: int
    ) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._size = vocabulary
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None

    def of_schema(self, schema: Mapping[str, Any], *, strict: bool) -> CompiledGrammar:
        """JSON that is valid to a schema.

        Args:
            schema: draft 2020-12.
            strict: refuse what cannot be held to; otherwise keywords that are not known change
                nothing.

        Raises:
            BadSchema: it is no schema, is too large, or cannot be held to.
        """
        check_schema(schema)
        grammar = {"grammars": [{"json_schema": guided(schema, SPACES, strict=strict)}]}
        return self.of_grammar(grammar)

    def of_grammar(self, grammar: Mapping[str, Any], *, whole: bool = True) -> CompiledGrammar:
        """What a grammar describes.

        Args:
            grammar: as llguidance takes them, JSON with a list `grammars`.
            whole: the answer is over as soon as it is all the grammar wants, where the model has no
                tokens that end one.

        Raises:
            BadSchema: it is no grammar, or too large.
        """
        with self._lock:  # one at a time: what strangers send takes one thread's time at most
            began = time.thread_time()
            matcher = LLMatcher(
                self._tokens(), json.dumps(dict(grammar)), limits=_LIMITS, log_level=0
            )
            if not matcher.is_error():
                matcher.compute_bitmask()
            if matcher.is_error():
                raise BadSchema(_why(matcher))
            if time.thread_time() - began > 4 * SLOW:
                raise BadSchema("it is too complex")
        tokens = max(self._size, self._tokens().vocab_size)
        return CompiledGrammar(matcher, self._size, tokens, alone=whole and not self._ends)

    def _tokens(self) -> LLTokenizer:
        """The tokenizer as llguidance has it, made when it is first needed: it takes a second."""
        if self._made is None:
            try:
                ends = sorted(self._ends) or None
                known: Any = self._tokenizer  # a fast one, or it is refused
                self._made = from_tokenizer(
                    known, n_vocab=max(self._size, len(known)), eos_token=ends
                )
            except Exception as error:  # llguidance raises whatever it finds
                why = shorten(str(error))
                raise BadSchema(f"this model's tokenizer has no grammars ({why})") from None
        return self._made


class CompiledGrammar:
    """A grammar that is compiled.

    Args:
        matcher: at its beginning.
        size: how many logits there are.
        tokens: how many tokens the matcher knows; as many or more.
        alone: the model has no token to say that an answer is over.
    """

    def __init__(self, matcher: LLMatcher, size: int, tokens: int, *, alone: bool) -> None:
        self._matcher = matcher
        self._size = size
        self._tokens = tokens
        self._alone = alone

    def mask(self) -> GrammarConstraint:
        """For one answer, at its beginning."""
        return GrammarConstraint(
            self._matcher.deep_copy(), self._size, self._tokens, alone=self._alone
        )


class GrammarConstraint:
    """What one answer may go on with (`weir.serve.Constraint`).

    Args:
        matcher: its own.
        size, tokens, alone: as `CompiledGrammar` has them.
    """

    def __init__(self, matcher: LLMatcher, size: int, tokens: int, *, alone: bool) -> None:
        self._matcher = matcher
        self._size = size
        self._alone = alone
        self._bits = np.zeros((1, -(-tokens // 32)), np.int32)

    @property
    def done(self) -> bool:
        """Whether there is nothing more to be said."""
        matcher = self._matcher
        return matcher.is_stopped() or (self._alone and matcher.is_accepting())

    def allow(self, logits: Tensor) -> Tensor:
        """The logits [vocabulary] with -inf for what may not come next; those given change.

        Raises:
            BadSchema: the grammar has become too complex.
        """
        began = time.thread_time()
        fill_next_token_bitmask(self._matcher, self._bits)
        self._check()
        if time.thread_time() - began > SLOW:
            raise BadSchema("what this answer must look like takes too long to work out")
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=self._size)
        return logits.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)

    def accept(self, token: int) -> None:
        """A token was chosen.

        Raises:
            BadSchema: it may not come next.
        """
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadSchema(f"the answer cannot be held to its grammar: {_why(self._matcher)}")


_WORDS = {
    "NoExtensionBias": "nothing is valid to it, as where a $ref leads to itself and nothing else",
    "LexerTooComplex": "it is too complex",
    "ParserTooComplex": "it is too complex",
}
"""For what llguidance says by a name alone."""


def _why(matcher: LLMatcher) -> str:
    """What is wrong with a grammar, in llguidance's words."""
    said = matcher.get_error().replace("<non-verbose/>", "").strip()
    return _WORDS.get(said) or shorten(said)


def guided(schema: Mapping[str, Any], spaces: str, *, strict: bool) -> dict[str, Any]:
    """A schema with what llguidance is to make of it: a client has no say in that.

    Args:
        schema: as a client sends it.
        spaces: what may stand between two parts, as a pattern; never without end, for a model could
            then go on with nothing else.
        strict: refuse keywords that are not known.
    """
    options = {"whitespace_pattern": spaces, "lenient": not strict}
    return {**schema, "x-guidance": options}
