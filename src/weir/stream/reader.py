"""Who reads tokens for a stream: a model over a cache, or a model over its window anew.

A stream asks for logits and for what is held; which of the two answers is none of its business.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import StreamingCache


class Reader(Protocol):
    """Reads tokens in order, and keeps of them what it needs to go on.

    Attributes:
        whole_prompt: the first tokens are to come in one piece, however many they are.
    """

    whole_prompt: bool

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept between tokens."""

    def forward(self, ids: Tensor, all_logits: bool) -> Tensor:
        """Logits after the next tokens `ids` [batch, n]: [batch, n, vocabulary], or of the last.

        Raises:
            NotFiniteError: the model makes something of them that is no number; they were not read.
        """

    def summary(self) -> str:
        """One line: the policy, tokens seen and bytes."""

    def report(self) -> dict[str, Any]:
        """The policy, tokens seen, bytes, and what is held layer by layer."""


class CacheReader:
    """A model over a `StreamingCache`.

    Attributes:
        model, cache: the model, and its cache.
    """

    def __init__(self, model: PreTrainedModel, cache: StreamingCache) -> None:
        self.model = model
        self.cache = cache
        self.whole_prompt = cache.prefill == "full"

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return self.cache.nbytes

    def forward(self, ids: Tensor, all_logits: bool) -> Tensor:
        """As `Reader.forward`."""
        keep = {} if all_logits or ids.shape[1] == 1 else {"logits_to_keep": 1}
        logits: Tensor = self.model(
            input_ids=ids, past_key_values=self.cache, use_cache=True, **keep
        ).logits
        return logits

    def summary(self) -> str:
        """As the cache says it."""
        return self.cache.summary()

    def report(self) -> dict[str, Any]:
        """As the cache says it."""
        return self.cache.report()
