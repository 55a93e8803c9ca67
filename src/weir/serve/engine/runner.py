"""Tokens for some rows of a cache in one call of the model.

A call is made over rows that lie side by side. Those among them that get nothing, and the beginning
of those that get less than the others, are padding that is computed for nothing. Knows nothing
about turns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import StreamingCache
from weir.errors import WeirError
from weir.models import input_device, transformers_model


@dataclass(frozen=True)
class StepOutput:
    """What came of a call.

    Attributes:
        logits: after the last token of each row that was fed, in their order [rows, vocabulary].
        failed: by row, why it did not take its tokens; its logits mean nothing.
    """

    logits: Tensor
    failed: dict[int, WeirError]


class ModelRunner:
    """Feeds rows of one cache.

    Args:
        model: whose cache it is.
        cache: with `failures="keep"`.

    Attributes:
        sizes: rows that a call of one token a row may be made over, the fewest first, where not any
            number will do: a compiled step has a graph for each.
    """

    def __init__(self, model: PreTrainedModel, cache: StreamingCache) -> None:
        self.sizes: tuple[int, ...] = ()
        self._model = model
        self._cache = cache
        self._device = input_device(transformers_model(model))

    def feed(self, tokens: Mapping[int, Sequence[int]]) -> StepOutput:
        """One call of the model.

        Args:
            tokens: by row, one or more.

        Raises:
            Exception: whatever the model raises; then the call never happened, unless the cache is
                broken.
        """
        width = max(map(len, tokens.values()))
        first, stop = self._span(tokens, width)
        # Behind padding: so the last column is every row's last token.
        nothing: Sequence[int] = ()
        parts = [list(tokens.get(row, nothing)) for row in range(first, stop)]
        ids = torch.tensor([[0] * (width - len(part)) + part for part in parts])
        mask = None
        if any(len(part) < width for part in parts):
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in parts])
        with self._cache.only(first, stop):
            out = self._model(
                input_ids=ids.to(self._device),
                attention_mask=None if mask is None else mask.to(self._device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: Tensor = out.logits[:, -1]
        index = [row - first for row in tokens]
        if index != list(range(len(logits))):
            logits = logits[index]
        return StepOutput(logits, {row + first: error for row, error in self._cache.failed.items()})

    def _span(self, rows: Collection[int], width: int) -> tuple[int, int]:
        """The rows that a call is made over, from the first to before the last."""
        first, stop = min(rows), max(rows) + 1
        if width > 1 or not self.sizes:
            return first, stop
        size = next(size for size in self.sizes if size >= stop - first)
        first = min(first, (self._cache.batch or size) - size)
        return first, first + size


def side_by_side(tokens: Mapping[int, int], most: int) -> bool:
    """Whether rows are worth a call of their own together.

    Args:
        tokens: by row, how many it is to be fed.
        most: tokens that a call may take as long as, padding among them.
    """
    computed = (max(tokens) + 1 - min(tokens)) * max(tokens.values())
    return computed <= most and computed <= 2 * sum(tokens.values())
