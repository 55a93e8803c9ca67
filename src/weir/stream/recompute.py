"""Sliding window with re-computation: the quality oracle of StreamingLLM (Figure 1c).

For every token the model reads its window from scratch, at positions 0 to budget - 1: the last
`budget` tokens, or, with sinks, the first tokens of the stream and as many of the last as fit then.
Nothing is cached and nothing of weir is in the model: plain forwards of overlapping windows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.errors import NotFiniteError, WeirError
from weir.models import sink_at_work, transformers_model, window_of
from weir.policies import Recompute
from weir.stream.fed import Fed
from weir.stream.reader import Reader

AT_ONCE = 8192
"""Tokens read in one forward; how many windows that is depends on the budget."""


class Recomputation(Reader):
    """The window of a stream, read anew for each new token.

    Attributes:
        held: the window's tokens [batch, at most budget], int64; None before the first.
    """

    def __init__(self, model: PreTrainedModel, policy: Recompute) -> None:
        """Windows as the policy wants them.

        Raises:
            WeirError: they are longer than the model's own, or the model's attention has not the
                sink that it was trained with.
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
        """Bytes of the token ids: all that is kept between tokens."""
        return 0 if self.held is None else self.held.nbytes

    @torch.no_grad()
    def forward(self, ids: Tensor, all_logits: bool) -> Tensor:
        """Logits after the new tokens `ids` [batch, n]: [batch, n, vocabulary], or the last.

        Raises:
            NotFiniteError: some are no numbers; the window is as it was.
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
        self, piece: Fed, all_logits: bool, start: int, refused: dict[int, NotFiniteError]
    ) -> Tensor:
        """As `Reader.read`; token by token where some logits are no numbers, and all rows alike.

        Raises:
            NotFiniteError: naming the token; those before it were read.
            WeirError: embeddings were fed.
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
        """One line: the policy, tokens seen and bytes."""
        return f"{self.policy}: {self.seen:,} tokens seen, {self.nbytes:,} bytes"

    def report(self, row: int = 0) -> dict[str, Any]:
        """The policy, tokens seen and bytes; nothing is held of any row."""
        return {"policy": str(self.policy), "seen": [self.seen], "bytes": self.nbytes}

    def take_over(self, other: Reader) -> None:
        """Go on from where another is; it goes on by itself."""
        assert isinstance(other, Recomputation)
        super().take_over(other)
        self.held, self._seen = None if other.held is None else other.held.clone(), other.seen

    def _window(self, text: Tensor, end: int) -> Tensor:
        """The window that ends before `end`, of a `text` [batch, n] that begins with the sinks."""
        if end <= self.budget:
            return text[:, :end]
        last = text[:, end - (self.budget - self.sinks) : end]
        return torch.cat([text[:, : self.sinks], last], dim=1)
