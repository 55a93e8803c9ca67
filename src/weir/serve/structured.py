"""Structured output: grammars that answers must follow, compiled and matched by llguidance.

A grammar is compiled in the thread that asks for it, and each answer has a separate matcher. The
compiler limits most of its work, but not nested repetitions in a pattern, or the automata for
`multipleOf`. The cost of both grows with the numbers in a client's schema, so these numbers are
limited here.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from weir.errors import WeirError, quote, shorten

ANY_SPACE = r"( |\n( {0,8}|\t{0,4}))"
"""White space between two tokens of JSON: a space, or a line end and an indent.

It is limited, because a model could otherwise write white space without end.
"""
ONE_SPACE = " "
MAX_SECONDS = 0.25
"""Limit of the processor time for computing which tokens are allowed next, in seconds. If it takes
longer, the answer fails.
"""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
MAX_BYTES = 65_536
"""The most bytes of a schema, written as JSON."""
MAX_DEPTH = 48
"""The most levels of nested lists and objects."""
MAX_PATTERN = 2000
"""The most characters of all patterns together, with repetitions written out."""
MAX_MULTIPLE = 2000
"""The largest allowed least common multiple of all `multipleOf` in a schema, each taken without its
decimal point (25 for 0.25).
"""

_PARTS = re.compile(r"\{(\d*),?(\d*)\}|\[\^?\]?(?:\\.|[^\]\\])*\]?|\\?.", re.DOTALL)
"""Parts of a pattern: a repetition count, a class of characters, or a character."""


class BadSchema(WeirError):
    """A JSON schema or grammar that answers cannot follow."""


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
        """Compile a JSON schema. `strict` refuses unknown keywords, which are otherwise ignored."""
        check_schema(schema)
        grammar = {"grammars": [{"json_schema": add_guidance(schema, ANY_SPACE, strict=strict)}]}
        return self.compile(grammar)

    def compile(
        self, grammar: Mapping[str, Any], *, stop_when_complete: bool = True
    ) -> Callable[[], GrammarConstraint]:
        """Compile a grammar to a function that makes the constraint of one answer.

        Raises BadSchema if it cannot be compiled.

        Args:
            grammar: a grammar as llguidance takes it, as JSON values.
            stop_when_complete: whether the constraint ends an answer as soon as the grammar accepts
                it, if the model has no token that ends answers.
        """
        with self._lock:  # one at a time, so that clients' grammars take at most one thread
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
        """Return the tokenizer in llguidance's form, made on first use. This takes a second."""
        if self._cached is None:
            try:
                stop_ids = sorted(self._stop_ids) or None
                # llguidance refuses any tokenizer that is not a fast one.
                known: Any = self._tokenizer
                self._cached = from_tokenizer(
                    known, n_vocab=max(self._size, len(known)), eos_token=stop_ids
                )
            except Exception as error:  # llguidance raises all kinds of exceptions
                reason = shorten(str(error))
                raise BadSchema(
                    f"this model's tokenizer cannot be used with grammars ({reason})"
                ) from None
        return self._cached


class GrammarConstraint:
    """The grammar that one answer must follow, token by token.

    Args:
        matcher: matcher of the grammar, at its start; it is copied.
        size: number of logits.
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
        """Return whether the answer is complete."""
        matcher = self._matcher
        return matcher.is_stopped() or (self._eager and matcher.is_accepting())

    def allow(self, logits: Tensor) -> Tensor:
        """Set the logits [vocabulary] to -inf, in place, for all tokens that must not come next."""
        began = time.thread_time()
        fill_next_token_bitmask(self._matcher, self._bits)
        self._check()
        if time.thread_time() - began > MAX_SECONDS:
            raise BadSchema(
                "the format of this answer takes too long to compute. Use a simpler schema."
            )
        bits = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=self._size)
        return logits.masked_fill_(torch.from_numpy(bits == 0), -torch.inf)

    def accept(self, token: int) -> None:
        """Advance by a token."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadSchema(f"the answer does not follow its grammar: {_error_of(self._matcher)}")


_SENTENCES = {
    "NoExtensionBias": "no value fits it, for example because a $ref leads only to itself",
    "LexerTooComplex": "it is too complex",
    "ParserTooComplex": "it is too complex",
}
"""Sentences for the errors that llguidance reports only by a name."""


def _error_of(matcher: LLMatcher) -> str:
    """Return the error of a matcher as a sentence."""
    message = matcher.get_error().replace("<non-verbose/>", "").strip()
    return _SENTENCES.get(message) or shorten(message)


def add_guidance(schema: Mapping[str, Any], spaces: str, *, strict: bool) -> dict[str, Any]:
    """Add llguidance's options to a schema, replacing any that the client sent.

    `spaces` is the pattern of white space between two tokens of JSON, which must be limited.
    """
    options = {"whitespace_pattern": spaces, "lenient": not strict}
    return {**schema, "x-guidance": options}


def check_schema(schema: Any) -> None:
    """Raise BadSchema for a schema that may take too long to compile, that has numbers which JSON
    does not allow, or whose `const` or `enum` has whole numbers that llguidance may round.
    """
    size = 0
    try:
        # In parts, and only up to the limit, because a client's schema may have megabytes.
        for part in json.JSONEncoder(allow_nan=False).iterencode(schema):
            size += len(part)
            if size > MAX_BYTES:
                raise BadSchema(f"it has more than {MAX_BYTES:,} bytes, the limit")
    except RecursionError:
        raise BadSchema(_TOO_DEEP) from None
    except (ValueError, TypeError):
        raise BadSchema("it has numbers that JSON does not allow") from None
    objects = _objects(schema)
    weight, multiple = 0, 1
    for node in objects:
        patterns = [node.get("pattern")]
        by_name = node.get("patternProperties")
        patterns += list(by_name) if isinstance(by_name, dict) else []
        weight += sum(_weight(pattern) for pattern in patterns if isinstance(pattern, str))
        multiple = math.lcm(multiple, _digits(node.get("multipleOf")))
        if weight > MAX_PATTERN:
            raise BadSchema(
                f"its patterns, with repetitions written out, have more than {MAX_PATTERN:,} "
                "characters, the limit"
            )
        if multiple > MAX_MULTIPLE:
            raise BadSchema(
                "its multipleOf values, without decimal points, have the least common multiple "
                f"{multiple:,}, but the limit is {MAX_MULTIPLE:,}"
            )
        listed = node.get("enum")
        for value in (node.get("const"), *(listed if isinstance(listed, list) else ())):
            if isinstance(value, int) and abs(value) > EXACT:
                raise BadSchema(
                    f"the number {value} may be rounded: a whole number must be from -{EXACT} to "
                    f"{EXACT}. Write it as a string."
                )


EXACT = 2**53
"""llguidance does not round whole numbers from -EXACT to EXACT, but may round any other."""
_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels, the limit"


def _objects(schema: Any) -> list[dict[str, Any]]:
    """Return all objects in a schema, level by level. Raises BadSchema if there are too many
    levels.
    """
    found: list[dict[str, Any]] = []
    level, depth = [schema], 0
    while level:
        if depth > MAX_DEPTH:
            raise BadSchema(_TOO_DEEP)
        objects = [one for one in level if isinstance(one, dict)]
        lists = [one for one in level if isinstance(one, list)]
        found += objects
        level = [below for one in (*lists, *(o.values() for o in objects)) for below in one]
        depth += 1
    return found


def _digits(multiple: Any) -> int:
    """Return a `multipleOf` without its decimal point: 25 for 0.25; 1 for 0 and for values
    that are not numbers.
    """
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not multiple:
        return 1
    digits = Decimal(str(multiple)).normalize().as_tuple()
    above = digits.exponent if isinstance(digits.exponent, int) else 0
    if above > 9:
        raise BadSchema(
            f"multipleOf {quote(multiple)} is not supported, because it ends in too many zeros"
        )
    return int("".join(map(str, digits.digits))) * 10 ** max(0, above)


def _weight(pattern: str) -> int:
    """Return the characters of a pattern with its repetitions written out.

    A repetition without an upper limit counts as its lower limit (`a{3,}`) or as one (`a*`), as it
    needs no more copies.
    """
    open_groups, group, last = [], 0, 0  # weights: of outer groups, this group, its last part
    for part in _PARTS.finditer(pattern):
        if part.lastindex:
            often = max((int(number[:9]) for number in part.groups() if number), default=1)
            group += last * (max(often, 1) - 1)
            last *= max(often, 1)
        elif part[0] == "(":
            open_groups.append(group)
            group = last = 0
        elif part[0] == ")":
            last, group = group, group + (open_groups.pop() if open_groups else 0)
        else:
            last, group = 1, group + 1
    return group + sum(open_groups)
