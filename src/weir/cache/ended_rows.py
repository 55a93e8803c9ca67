"""Rows of a batch that `generate` feeds padding, because they ended before the others.

transformers goes on feeding a row after it has ended, with mask 1, until the last row has ended.
Only the stopping criteria of the call say which rows these are: the end tokens may come from the
call's arguments, and a row may end at a string or where a caller's own criterion says so. So weir
watches the criteria instead of guessing from the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, StoppingCriteriaList


class EndedRows:
    """What one call of `generate` has said about its rows.

    Attributes:
        pad: the token that ended rows are fed; None if the call has none.
        only_new: whether the call was given embeddings of new tokens only, and feeds them next.
    """

    def __init__(self) -> None:
        self.pad: int | None = None
        self.only_new = False
        self._done: Tensor | None = None
        self._padding: Tensor | None = None
        self._flags: list[bool] | None = None

    def watch(self, config: GenerationConfig, criteria: StoppingCriteriaList) -> Any:
        """Return stopping criteria that behave as these and note here which rows have ended.

        Beam search feeds no row after its end, so its criteria are returned as they are.
        """
        if config.num_beams not in (None, 1) or isinstance(criteria, _Watched):
            return criteria
        # Without an end token, rows that a caller's own criterion ended are fed what they say.
        ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.pad = _pad_of(config) if ends else None
        return _Watched(criteria, self)

    def note(self, tokens: Tensor, done: Tensor) -> None:
        """Note the newest token of every row [batch], and which rows have ended with it [batch]."""
        if self._done is None or self.pad is None:
            self._padding = tokens.new_zeros(tokens.shape).bool()
        else:  # where a row had ended before, its newest token is padding
            self._padding = self._done & (tokens == self.pad)
        self._done = done.bool() if self._done is None else self._done | done.bool()
        self._flags = None

    def padded(self, batch: int) -> list[bool] | None:
        """Return in which rows the newest token is padding; None before the first token."""
        if self._padding is None or len(self._padding) != batch:
            return None
        if self._flags is None:
            self._flags = self._padding.tolist()
        return self._flags


class _Watched(StoppingCriteriaList):
    """Stopping criteria that tell `EndedRows` what they found."""

    def __init__(self, criteria: Iterable[Any], ended: EndedRows) -> None:
        super().__init__(criteria)
        self._ended = ended

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return which rows have ended [batch], and note it."""
        done: Any = super().__call__(input_ids, scores, **kwargs)
        self._ended.note(input_ids[:, -1], done)
        return done


def _pad_of(config: GenerationConfig) -> int | None:
    """Return the padding token of a call; without one, `generate` takes the first end token."""
    for given in (config.pad_token_id, config.eos_token_id):
        tokens = given.tolist() if isinstance(given, Tensor) else given
        if isinstance(tokens, (list, tuple)):
            tokens = tokens[0] if tokens else None
        if tokens is not None:
            return int(tokens)
    return None
