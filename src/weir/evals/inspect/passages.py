"""Passages of a text: what is measured on one may be chance, on several it has an interval.

Knows how long a text a model takes; nothing about what is measured.
"""

from __future__ import annotations

from torch import Tensor

from weir.errors import WeirError
from weir.evals.inspect.section import Asked
from weir.evals.inspect.sequences import count_of, pieces
from weir.models import window_of

MOST = 4096
"""Tokens of a passage, at most: what a layer is given for one is held in whole."""


def longest(asked: Asked, usual: int) -> int:
    """Tokens of the longest passage: as asked for, or `usual`, or what the model's window holds.

    Raises:
        WeirError: more were asked for than can be held.
    """
    if asked.tokens is None:
        return min(usual, window_of(asked.model.config) or MOST)
    if asked.tokens > MOST:
        raise WeirError(
            f"queries, keys and values of {asked.tokens:,} tokens are too many to be held at once; "
            f"take {MOST:,} at most"
        )
    return asked.tokens


def passages(asked: Asked, length: int, count: int, fewest: int) -> Tensor:
    """Passages of a text, one after the other, each with the start token in front.

    Args:
        asked: has the text.
        length: tokens of a passage; a text with fewer is one passage, as long as it is.
        count: so many passages at most.
        fewest: tokens without which a passage is of no use.

    Returns:
        [passages, length], int64.

    Raises:
        WeirError: the text or the length is too short.
    """
    length = min(length, count_of(asked.tokenizer, asked.text, length))
    if length < fewest:
        raise WeirError(
            f"{length} tokens are too few; take a text, and passages of it, of {fewest} or more"
        )
    return pieces(asked.tokenizer, asked.text, count, length, asked.sink)
