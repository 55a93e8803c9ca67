"""The sum of noisy, softened attention, which also keeps tokens that might have mattered.

Keyformer (Adnan et al. 2024, "Keyformer: KV Cache Reduction through Key Tokens Selection for
Efficient Generative Inference", arXiv:2403.09054), section 3.3 and Algorithm 1: a token's score is
the sum over all queries of softmax((logit + Gumbel noise) / tau), with a temperature that rises
from 1 to 2 over the text. The newest tokens are kept separately (`recent`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from weir.pools.base import Fold
from weir.pools.parameters import Bounds, Count
from weir.pools.ranked import Asking, Tallied
from weir.pools.registry import pool
from weir.pools.scores.vase import gumbel
from weir.slab import Slots

READ = "read"
"""The name, in `Fold.state`, of the place after the last query that was counted."""


@pool("keyformer")
@dataclass(frozen=True)
class Keyformer(Asking, Tallied):
    """Keep the tokens with the largest sum of noisy attention, separately for each KV head.

    Each query counts once, at the next fold, for the tokens that are then in the pool or arrive.
    Tokens newer than the query are left out of its softmax, which is summed over the query heads of
    the group.

    Attributes:
        n: number of tokens to keep.
        hot: the final temperature.
        over: number of tokens of the stream over which the temperature rises from 1 to `hot`.
        window: the most queries that a fold counts; if more are new, only the last of them count.
    """

    is_stochastic = True

    n: int
    hot: Annotated[float, Bounds(1)] = 2.0
    over: Count = 4096
    window: Count = 64

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make the sums, and the place after the last counted query [batch, kv_heads, 1], int64."""
        batch, heads = like.position.shape[:2]
        return {**super().state(like), READ: like.position.new_zeros(batch, heads, 1)}

    def tally(self, slots: Slots, before: Tensor, fold: Fold) -> Tensor:
        """Return the sums, including the queries since the last fold [batch, kv_heads, slots],
        float32.
        """
        place = fold.observed.query_positions[:, None, -self.window :]
        fresh = (place >= fold.state[READ]) & (place >= fold.origin)
        fold.state[READ] = fold.next[:, None, None].expand_as(fold.state[READ]).contiguous()
        rise = ((place - fold.origin) / self.over).clamp(max=1.0)
        tau = (1 + (self.hot - 1) * rise)[:, :, None, :, None]
        logits = self.logits(slots, fold)
        noisy = (logits + self._noise(slots, fold, place, logits.shape[2])) / tau
        # A query that sees none of these tokens adds nothing.
        share = noisy.softmax(dim=-1).nan_to_num(nan=0.0) * fresh[:, :, None, :, None]
        return before + share.sum(dim=(2, 3)).float()

    def _noise(self, slots: Slots, fold: Fold, place: Tensor, group: int) -> Tensor:
        """Return a random number for each query head, query and token [batch, kv_heads, group, n,
        slots].
        """
        heads = torch.arange(group, device=place.device).view(-1, 1, 1, 1, 1)
        index = place.permute(2, 0, 1)[..., None] * group + heads
        return gumbel(fold.draws.uniform(0, slots.position, index)).permute(2, 3, 0, 1, 4)
