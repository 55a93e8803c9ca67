"""Who reads the tokens of a stream: a model over a cache, or over its window anew.

A stream asks for logits and for what is kept; which of the two answers is none of its business.
Knows nothing about how texts are cut, scored or continued.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import StreamingCache
from weir.errors import NotFiniteError
from weir.stream.fed import Fed


class Reader(ABC):
    """Reads tokens in order, and keeps of them what it needs to go on.

    Attributes:
        whole_prompt: the first tokens are to come in one piece, however many they are.
        logits: after the last token of each row [batch, vocabulary]; None before the first.
        last: the last token of each row, None where it has no id; none before the first.
    """

    whole_prompt = False

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.logits: Tensor | None = None
        self.last: list[int | None] = []

    @property
    @abstractmethod
    def seen(self) -> int:
        """Tokens so far; in a batch, of the row that has come farthest."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of what is kept between tokens, logits not counted."""

    @abstractmethod
    def read(
        self, piece: Fed, all_logits: bool, start: int, refused: dict[int, NotFiniteError]
    ) -> Tensor | None:
        """Read the next tokens of the rows that nothing was refused of.

        Rows that are refused now are added to `refused`, and what stands before the token that is
        to blame is read.

        Args:
            piece: the tokens.
            all_logits: logits after every token, not only the last.
            start: how many tokens of the call came before the piece.
            refused: by row, why its tokens are not read any more.

        Returns:
            Logits [batch, length or 1, vocabulary]; None if no row is left.

        Raises:
            NotFiniteError: the model makes something of the tokens that is no number, and which row
                is to blame is not told apart.
        """

    @abstractmethod
    def summary(self) -> str:
        """One line: the policy, tokens seen and bytes."""

    @abstractmethod
    def report(self, row: int = 0) -> dict[str, Any]:
        """The policy, tokens seen, bytes, and what is held of a row layer by layer, if anything."""

    def take_over(self, other: Reader) -> None:
        """Go on from where another of the same kind is; that one goes on by itself."""
        self.logits = None if other.logits is None else other.logits.clone()
        self.last = list(other.last)

    def keep(self, piece: Fed, logits: Tensor, without: Collection[int] = ()) -> Tensor:
        """Remember the last tokens and logits of all rows but `without`; returns the logits."""
        last, after = piece.last, logits[:, -1].clone()
        if without:
            before = torch.zeros_like(after) if self.logits is None else self.logits
            for row in without:
                after[row] = before[row]
                last[row] = self.last[row] if self.last else 0
        self.logits, self.last = after, last
        return logits


class CacheReader(Reader):
    """A model over a `StreamingCache` that keeps the failures of its rows."""

    def __init__(self, model: PreTrainedModel, cache: StreamingCache) -> None:
        super().__init__(model)
        self.cache = cache
        self.whole_prompt = cache.prefill == "full"

    @property
    def seen(self) -> int:
        """As the cache says it."""
        return max(self.cache.seen, default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return self.cache.nbytes

    def summary(self) -> str:
        """As the cache says it."""
        return self.cache.summary()

    def report(self, row: int = 0) -> dict[str, Any]:
        """As the cache says it."""
        return self.cache.report(row)

    def take_over(self, other: Reader) -> None:
        """Go on from where another is, with rows of one's own."""
        assert isinstance(other, CacheReader)
        super().take_over(other)
        self.cache.put_rows(other.cache.take_rows())

    def read(
        self, piece: Fed, all_logits: bool, start: int, refused: dict[int, NotFiniteError]
    ) -> Tensor | None:
        """As `Reader.read`: a row fails by itself, the others go on."""
        try:
            logits: Tensor | None = self._forward(piece, all_logits, refused)
        except NotFiniteError:
            logits = None
        failed = self.cache.failed.items()
        new = {row: error for row, error in failed if isinstance(error, NotFiniteError)}
        if logits is not None:
            self.keep(piece, logits, {*refused, *new})
        for row, error in new.items():
            place = error.place or 0
            if place:
                only = {other for other in range(piece.rows) if other != row}
                before = piece.part(0, place)
                self.keep(before, self._forward(before, False, only), only)
            refused[row] = NotFiniteError(
                error.layer,
                row=error.row,
                place=start + place,
                token=error.token,
                from_there=True,
            )
        return logits

    def _forward(self, piece: Fed, all_logits: bool, without: Collection[int]) -> Tensor:
        """The model's logits; rows `without` are fed nothing, and theirs mean nothing."""
        more: dict[str, Any] = {}
        if not (all_logits or len(piece) == 1):
            more["logits_to_keep"] = 1
        if without:
            mask = torch.ones_like(piece.ids)
            mask[list(without)] = 0
            more["attention_mask"] = mask
        with torch.no_grad():
            logits: Tensor = self.model(
                **piece.given, past_key_values=self.cache, use_cache=True, **more
            ).logits
        return logits
