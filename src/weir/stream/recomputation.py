"""Recomputes the window for each new token, without a cache.

This is StreamingLLM's quality oracle, the sliding window with re-computation (Xiao et al. 2024,
Figure 1c): plain forwards over the last `budget` tokens, at positions 0 to budget - 1. With sinks,
the stream's first tokens replace the oldest of these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.errors import NotFiniteError, WeirError, in_words
from weir.models import sink_at_work, transformers_model, window_of
from weir.policies import Recompute

AT_ONCE = 8192
"""Several windows are read in one forward if they have at most this many tokens together."""


class Recomputation:
    """The window of a stream under `Recompute`, which replaces a cache.

    Attributes:
        held: the window's tokens [batch, at most budget], int64; None before the first.
        seen: tokens so far [1], the same for all rows.
    """

    def __init__(self, model: PreTrainedModel, policy: Recompute) -> None:
        """Check the model. WeirError if the policy's window is longer than the model's, or if the
        model was trained with a Zero Sink (an extra 0 among the logits of the softmax), and its
        attention does not implement one.
        """
        config = transformers_model(model).config.get_text_config(decoder=True)
        sink_at_work(config)
        limit = window_of(config)
        if limit is not None and policy.budget > limit:
            raise WeirError(
                f"recompute reads {policy.budget} tokens at once, but the model can read only "
                f"{limit}. Use a budget of at most {limit}."
            )
        self.model = model
        self.policy = policy
        self.held: Tensor | None = None
        self.seen = [0]

    @property
    def nbytes(self) -> int:
        """Bytes of the token ids. Nothing else is kept between tokens."""
        return 0 if self.held is None else self.held.nbytes

    @torch.no_grad()
    def forward(self, ids: Tensor, all_logits: bool) -> Tensor:
        """Return logits after the new tokens `ids` [batch, n]: [batch, n, vocabulary], or only the
        last.

        Raises NotFiniteError if some are NaN; the window then stays as it was.
        """
        budget = self.policy.budget
        before = ids[:, :0] if self.held is None else self.held
        text = torch.cat([before, ids], dim=1)
        total = text.shape[1]
        place = before.shape[1] if all_logits else total - 1
        parts = []
        if place < budget:
            # Nothing has left the window yet, so one causal forward is enough for all these tokens.
            stop = min(budget, total)
            parts.append(self.model(text[:, :stop], use_cache=False).logits[:, place:stop])
            place = stop
        step = max(1, AT_ONCE // (budget * ids.shape[0]))
        for start in range(place, total, step):
            ends = range(start + 1, min(start + step, total) + 1)
            windows = torch.stack([self._window(text, end) for end in ends], dim=1)
            # All logits of many windows would not fit in memory, so only the last hidden state is
            # unembedded.
            logits = self.model(windows.flatten(0, 1), use_cache=False, logits_to_keep=1).logits
            parts.append(logits[:, -1].unflatten(0, windows.shape[:2]))
        found = torch.cat(parts, dim=1)
        if bool(found.isnan().any()):
            raise NotFiniteError(None)
        self.held = self._window(text, total).clone()
        self.seen = [self.seen[0] + ids.shape[1]]
        return found

    def summary(self) -> str:
        """Return one line: the policy, tokens seen and bytes."""
        return f"{self.policy}: {in_words(self.seen[0], 'token')} seen, {self.nbytes:,} bytes"

    def report(self, row: int = 0) -> dict[str, Any]:
        """Return the policy, tokens seen, bytes, and how steps run."""
        reason = "each window is recomputed from its tokens, without a cache"
        steps = {"run": "eager", "reason": reason}
        return {
            "policy": str(self.policy),
            "seen": self.seen,
            "bytes": self.nbytes,
            "steps": steps,
        }

    def _window(self, text: Tensor, end: int) -> Tensor:
        """Return the window before `end` of a `text` [batch, n] that begins with the sinks."""
        budget, sinks = self.policy.budget, self.policy.sinks
        if end <= budget:
            return text[:, :end]
        return torch.cat([text[:, :sinks], text[:, end - (budget - sinks) : end]], dim=1)
