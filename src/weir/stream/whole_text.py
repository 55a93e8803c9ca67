"""The text of a stream under `kvzip`, which is read as a whole, repeated, and then held in a cache
of fixed size.

Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
arXiv:2505.23416, section 3.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.cache import Repetition, StreamingCache, fill, repetition_scores
from weir.errors import WeirError
from weir.policies import KVzip

REQUEST = "\n\nRepeat the text above, word for word:\n\n"
"""The request in front of the first part of the text, which is repeated part by part."""
NEXT_REQUEST = "\n\nGo on repeating the text above, word for word, after these words:\n\n"
"""The request in front of the other parts; the last tokens of the previous part follow it."""
LEAD = 8
"""Number of tokens of the previous part that follow `NEXT_REQUEST`."""


class WholeText:
    """The text that a stream under `kvzip` has read so far.

    Attributes:
        cache: the cache that holds all of it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: KVzip,
        tokenizer: PreTrainedTokenizerBase | None,
        options: dict[str, Any],
    ) -> None:
        """Check the model; WeirError if it never sees a whole text."""
        self._model, self._policy, self._options = model, policy, options
        self._tokenizer = tokenizer
        self.cache = StreamingCache(model, "dense", **{**options, "prefill": "chunked"})
        windows = self.cache.slots_by_layer
        if None not in windows:
            raise WeirError(
                "kvzip reads a text as a whole, but every layer of this model sees only the "
                f"newest {windows[0]:,} tokens. Use another policy."
            )
        self._ids: list[list[int]] = []

    def check(self, embeddings: Tensor | None) -> None:
        """Refuse inputs that cannot be repeated (WeirError)."""
        if embeddings is not None:
            raise WeirError(
                "kvzip lets the model repeat token ids, but images or embeddings were fed. Use "
                "another policy."
            )
        if self._policy.asks and self._tokenizer is None:
            raise WeirError(
                "kvzip asks the model in words to repeat the text, which needs the tokenizer. Use "
                "Stream(model, policy, tokenizer=tokenizer), or kvzip(256, asks=false), which "
                "only shows the model the text again."
            )

    def copy(self, other: WholeText) -> None:
        """Take over the text that another one has read."""
        self.cache.put_rows(other.cache.take_rows(), check=False)
        self._ids = [list(ids) for ids in other._ids]

    def close(self) -> None:
        """Free the full cache now. It is in reference cycles, so Python would free it later."""
        self.cache.reset()
        self.cache.detach()

    def add(self, ids: Tensor, without: Collection[int]) -> None:
        """Record the tokens [rows, length] that the cache has read, except in some rows."""
        self._ids = self._ids or [[] for _ in ids]
        for row, more in enumerate(ids.tolist()):
            if row not in without:
                self._ids[row] += more

    def keep(self) -> StreamingCache:
        """Return a cache of the policy's size with the tokens that each row needs most to repeat
        its text.
        """
        kept = new_cache(self._model, self._policy, self._options)
        alone = new_cache(self._model, self._policy, {**self._options, "batch": 1})
        states = []
        for row, ids in enumerate(self._ids):
            scores = self._scores(row, torch.tensor(ids))
            fill(alone, self.cache, row, scores, self._policy.kept)
            states.append(alone.take_row(0))
            alone.reset()
        kept.put_rows(states, check=False)
        alone.detach()
        self.close()
        return kept

    def _scores(self, row: int, ids: Tensor) -> dict[int, Tensor]:
        """Return the scores of a row by layer. If all tokens fit, no scores are needed, and all are
        0.
        """
        parts = [] if len(ids) <= self._policy.kept else self.repetitions(ids)
        return repetition_scores(self._model, self.cache, row, parts)

    def repetitions(self, ids: Tensor) -> list[Repetition]:
        """Return the tokens that are fed to let the model repeat the text `ids` [length], part by
        part.
        """
        found = []
        for start in range(0, len(ids), self._policy.part):
            stop = min(start + self._policy.part, len(ids))
            lead = ids[max(0, start - LEAD) : start]
            request = self._request(NEXT_REQUEST if start else REQUEST)
            found.append(Repetition(start, stop, torch.cat([request, lead, ids[start:stop]])))
        return found

    def _request(self, words: str) -> Tensor:
        """Return the ids of a request [length]; empty if the model is not asked in words."""
        if not self._policy.asks or self._tokenizer is None:
            return torch.empty(0, dtype=torch.int64)
        ids = self._tokenizer(words, add_special_tokens=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.int64)


def new_cache(model: PreTrainedModel, policy: KVzip, options: dict[str, Any]) -> StreamingCache:
    """Make an empty cache for the tokens that are kept of a text."""
    # A text is folded once, whatever its length, like a whole prompt.
    return StreamingCache(model, policy.after, **{**options, "prefill": "full"})
