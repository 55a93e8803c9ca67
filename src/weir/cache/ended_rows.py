"""Rows of a batch that `generate` feeds padding, because they ended before the others.

transformers feeds padding to a row that has ended, with mask 1, until the last row has ended. Only
the stopping criteria of the call know which rows have ended: the end tokens may come from the
call's arguments, and a row may end at a string or by a caller's own criterion. So weir watches the
criteria instead of guessing from the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList

Tell = Callable[[list[bool], int | None], None]
"""Function that is told in which rows the newest token is padding, and the padding token (None if
`generate` does not pad rows that have ended).
"""


class WatchedCriteria(StoppingCriteriaList):
    """Stopping criteria of one call of `generate` that tell a cache which rows they have ended.

    Args:
        criteria: all stopping criteria of the call.
        config: the call's configuration, which has the padding token.
        tell: called after each token, as described at `Tell`.
    """

    def __init__(self, criteria: Iterable[Any], config: GenerationConfig, tell: Tell) -> None:
        super().__init__(criteria)
        self._tell = tell
        # Without an end token, transformers does not pad. It feeds a row that has ended the tokens
        # that were chosen for this row.
        ends = any(hasattr(criterion, "eos_token_id") for criterion in self)
        self._pad = _pad_of(config) if ends else None
        self._done: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return which rows have ended [batch], and tell the cache."""
        done: Any = super().__call__(input_ids, scores, **kwargs)
        if self._done is None or self._pad is None:
            padded = [False] * len(input_ids)
        else:  # if a row had ended before, its newest token is padding
            padded = (self._done & (input_ids[:, -1] == self._pad)).tolist()
        self._done = done.bool() if self._done is None else self._done | done.bool()
        self._tell(padded, self._pad)
        return done


def watch(config: GenerationConfig, criteria: StoppingCriteriaList, tell: Tell) -> Any:
    """Return stopping criteria that behave like `criteria`, and call `tell` after each token.

    Beam search never feeds a row after its end, so its criteria are returned as they are.
    """
    if config.num_beams not in (None, 1) or isinstance(criteria, WatchedCriteria):
        return criteria
    return WatchedCriteria(criteria, config, tell)


def _pad_of(config: GenerationConfig) -> int | None:
    """Return the padding token of a call; without one, `generate` takes the first end token."""
    for given in (config.pad_token_id, config.eos_token_id):
        tokens = given.tolist() if isinstance(given, Tensor) else given
        if isinstance(tokens, (list, tuple)):
            tokens = tokens[0] if tokens else None
        if tokens is not None:
            return int(tokens)
    return None
