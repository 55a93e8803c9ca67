"""One call of the model over some rows of a cache.

A call is made over neighboring rows. Rows among them that get no tokens, and the beginning of those
that get fewer than others, are padding. Knows nothing about sequences.
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
    """What a call of the model gave.

    Attributes:
        logits: after the last token of each row, in the order they were given [rows, vocabulary].
        failed: by row, why it did not take its tokens; its logits mean nothing.
    """

    logits: Tensor
    failed: dict[int, WeirError]


class ModelRunner:
    """Feeds tokens to rows of one cache.

    Args:
        cache: with `failures="keep"`.

    Attributes:
        sizes: the numbers of rows that a call of one token a row may have, ascending; empty for
            any. A compiled step has a graph for each.
    """

    def __init__(self, model: PreTrainedModel, cache: StreamingCache) -> None:
        self.sizes: tuple[int, ...] = ()
        self._model = model
        self._cache = cache
        self._device = input_device(transformers_model(model))

    def run(self, tokens: Mapping[int, Sequence[int]]) -> StepOutput:
        """Call the model once.

        Raises:
            Exception: whatever the model raises; no row has changed, unless `cache.broken`.
        """
        width = max(map(len, tokens.values()))
        first, stop = self._span(tokens, width)
        # Padding stands in front, so that the last column is the last token of every row.
        parts = [list(tokens.get(row, ())) for row in range(first, stop)]
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
        """The rows of a call: the first, and the one after the last."""
        first, stop = min(rows), max(rows) + 1
        if width > 1 or not self.sizes:
            return first, stop
        size = next(size for size in self.sizes if size >= stop - first)
        first = min(first, (self._cache.batch or size) - size)
        return first, first + size
