"""Sliding window with re-computation: the quality oracle of StreamingLLM (Figure 1c).

For every token the model reads the last `budget` tokens from scratch, at positions 0 to budget - 1.
Nothing is cached and nothing of weir is in the model: plain forwards of overlapping windows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.errors import WeirError

AT_ONCE = 8192
"""Tokens read in one forward; how many windows that is depends on the budget."""


class Recomputation:
    """The last tokens of a stream, read anew for each new one.

    Attributes:
        held: the last tokens [batch, at most budget], int64; None before the first.
    """

    def __init__(self, model: PreTrainedModel, budget: int) -> None:
        """Windows of `budget` tokens.

        Raises:
            WeirError: the window is longer than the model's own.
        """
        limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit is not None and budget > limit:
            raise WeirError(f"recompute cannot read {budget} tokens at once: the model knows {limit}")
        self.model = model
        self.budget = budget
        self.held: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the token ids: all that is kept between tokens."""
        return 0 if self.held is None else self.held.nbytes

    @torch.no_grad()
    def forward(self, ids: Tensor, all_logits: bool) -> Tensor:
        """Logits after the new tokens `ids` [batch, n]: [batch, n, vocabulary], or the last only."""
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
            windows = torch.stack([text[:, end - self.budget : end] for end in ends], dim=1)
            # Whole logits of many windows would not fit: only the last hidden state is unembedded.
            logits = self.model(windows.flatten(0, 1), use_cache=False, logits_to_keep=1).logits
            parts.append(logits[:, -1].unflatten(0, windows.shape[:2]))
        self.held = text[:, -self.budget :].clone()
        return torch.cat(parts, dim=1)
