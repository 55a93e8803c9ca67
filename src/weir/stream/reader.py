"""Readers of a stream's tokens: a model over a cache, or over its window anew for each token.

The second is StreamingLLM's quality oracle, sliding window with re-computation (Xiao et al. 2024,
Figure 1c): plain forwards over the last `budget` tokens, or the first and the last, at positions 0
to budget - 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import StreamingCache
from weir.errors import NotFiniteError, WeirError
from weir.models import sink_at_work, transformers_model, window_of
from weir.policies import Recompute
from weir.stream.inputs import Inputs


class Reader(ABC):
    """Reads tokens in order, and keeps what it needs to continue.

    Attributes:
        whole_prompt: whether the first tokens have to come in one piece, however many they are.
        logits: after the last token of each row [batch, vocabulary]; None before the first.
        last: the last token of each row, None if it has no id; empty before the first.
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
        """Bytes kept between tokens, logits not counted."""

    @property
    def room(self) -> int | None:
        """Tokens that can be read at once; None for any number."""
        return None

    @abstractmethod
    def read(
        self, piece: Inputs, all_logits: bool, start: int, refused: dict[int, NotFiniteError]
    ) -> Tensor | None:
        """Read the next tokens of all rows that were not refused, and return logits [batch, length
        or 1, vocabulary]; None if no row is left.

        Args:
            all_logits: whether to return logits after every token, not only the last.
            start: how many tokens of the call came before the piece.
            refused: by row, the error after which its tokens are no longer read; rows refused now
                are added, and their tokens before the bad one are read.

        Raises:
            NotFiniteError: the model computes NaN from the tokens, and the row is not known.
        """

    @abstractmethod
    def summary(self) -> str:
        """Return one line: the policy, tokens seen and bytes."""

    @abstractmethod
    def report(self, row: int = 0) -> dict[str, Any]:
        """Return the policy, tokens seen, bytes, and what each layer holds of a row."""

    def take_over(self, other: Reader) -> None:
        """Take over the state of another reader of the same kind, which keeps its own."""
        self.logits = None if other.logits is None else other.logits.clone()
        self.last = list(other.last)

    def keep(self, piece: Inputs, logits: Tensor, without: Collection[int] = ()) -> Tensor:
        """Keep the last tokens and logits of all rows but `without`, and return the logits."""
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
        """Tokens so far, as the cache counts them."""
        return max(self.cache.seen, default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return self.cache.nbytes

    @property
    def room(self) -> int | None:
        """Tokens up to the next fold where chunks are read twice; else None."""
        return self.cache.room()

    def summary(self) -> str:
        """Return the cache's summary."""
        return self.cache.summary()

    def report(self, row: int = 0) -> dict[str, Any]:
        """Return the cache's report."""
        return self.cache.report(row)

    def take_over(self, other: Reader) -> None:
        """Take over the state of another reader, with rows of its own."""
        assert isinstance(other, CacheReader)
        super().take_over(other)
        self.cache.put_rows(other.cache.take_rows(), check=False)

    def read(
        self, piece: Inputs, all_logits: bool, start: int, refused: dict[int, NotFiniteError]
    ) -> Tensor | None:
        """See `Reader.read`; a row fails by itself, and the others continue."""
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

    def _forward(self, piece: Inputs, all_logits: bool, without: Collection[int]) -> Tensor:
        """Return the model's logits; rows `without` are fed nothing and have none of their own."""
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


AT_ONCE = 8192
"""Tokens of one forward; the budget decides how many windows that is."""


class Recomputation(Reader):
    """The window of a stream, read anew for each new token.

    Attributes:
        held: the window's tokens [batch, at most budget], int64; None before the first.
    """

    def __init__(self, model: PreTrainedModel, policy: Recompute) -> None:
        """Refuse windows longer than the model's own, or attention without the sink it was trained
        with.
        """
        config = transformers_model(model).config.get_text_config(decoder=True)
        sink_at_work(config)
        limit = window_of(config)
        if limit is not None and policy.budget > limit:
            raise WeirError(
                f"recompute cannot read {policy.budget} tokens at once: the model knows {limit}"
            )
        super().__init__(model)
        self.policy = policy
        self.budget = policy.budget
        self.sinks = policy.sinks
        self.held: Tensor | None = None
        self._seen = 0

    @property
    def seen(self) -> int:
        """Tokens so far, of each row."""
        return self._seen

    @property
    def nbytes(self) -> int:
        """Bytes of the token ids, which are all that is kept between tokens."""
        return 0 if self.held is None else self.held.nbytes

    @torch.no_grad()
    def forward(self, ids: Tensor, all_logits: bool) -> Tensor:
        """Return logits after the new tokens `ids` [batch, n]: [batch, n, vocabulary], or the last.

        Raises NotFiniteError if some are no numbers; the window is as it was.
        """
        before = ids[:, :0] if self.held is None else self.held
        text = torch.cat([before, ids], dim=1)
        total = text.shape[1]
        place = before.shape[1] if all_logits else total - 1
        parts = []
        if place < self.budget:
            # Nothing has left the window yet: one causal forward answers for all these tokens.
            stop = min(self.budget, total)
            parts.append(self.model(text[:, :stop], use_cache=False).logits[:, place:stop])
            place = stop
        step = max(1, AT_ONCE // (self.budget * ids.shape[0]))
        for start in range(place, total, step):
            ends = range(start + 1, min(start + step, total) + 1)
            windows = torch.stack([self._window(text, end) for end in ends], dim=1)
            # Whole logits of many windows would not fit: only the last hidden state is unembedded.
            logits = self.model(windows.flatten(0, 1), use_cache=False, logits_to_keep=1).logits
            parts.append(logits[:, -1].unflatten(0, windows.shape[:2]))
        found = torch.cat(parts, dim=1)
        if bool(found.isnan().any()):
            raise NotFiniteError(None)
        self.held = self._window(text, total).clone()
        self._seen += ids.shape[1]
        return found

    def read(
        self, piece: Inputs, all_logits: bool, start: int, refused: dict[int, NotFiniteError]
    ) -> Tensor:
        """See `Reader.read`; token by token if some logits are NaN, and all rows alike.

        Raises NotFiniteError with the token, or WeirError if embeddings were fed.
        """
        if piece.embeddings is not None:
            raise WeirError(
                "recompute reads its window anew from token ids, and takes neither images nor "
                "embeddings; choose a policy that caches"
            )
        try:
            return self.keep(piece, self.forward(piece.ids, all_logits))
        except NotFiniteError:
            if len(piece) == 1:
                token = int(piece.ids[0, 0])
                raise NotFiniteError(None, place=start, token=token, from_there=True) from None
            tokens = [(start + at, piece.part(at, at + 1)) for at in range(len(piece))]
            return torch.cat([self.read(it, True, at, refused) for at, it in tokens], dim=1)

    def summary(self) -> str:
        """Return one line: the policy, tokens seen and bytes."""
        return f"{self.policy}: {self.seen:,} tokens seen, {self.nbytes:,} bytes"

    def report(self, row: int = 0) -> dict[str, Any]:
        """Return the policy, tokens seen and bytes."""
        return {"policy": str(self.policy), "seen": [self.seen], "bytes": self.nbytes}

    def take_over(self, other: Reader) -> None:
        """Take over the state of another reader, which keeps its own."""
        assert isinstance(other, Recomputation)
        super().take_over(other)
        self.held, self._seen = None if other.held is None else other.held.clone(), other.seen

    def _window(self, text: Tensor, end: int) -> Tensor:
        """Return the window before `end` of a `text` [batch, n] that begins with the sinks."""
        if end <= self.budget:
            return text[:, :end]
        last = text[:, end - (self.budget - self.sinks) : end]
        return torch.cat([text[:, : self.sinks], last], dim=1)
