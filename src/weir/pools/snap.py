"""Snapshots: the last queries vote on which tokens to keep.

SnapKV (Li et al. 2024, "SnapKV: LLM Knows What You Are Looking for Before Generation",
arXiv:2404.14469), section 4 and Listing 1: the attention of the last queries, the *observation
window*, is summed for each token before the window and pooled over neighboring positions. The
tokens with the highest pooled votes are kept, and so is the window. In a stream, this happens at
every fold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, Pool
from weir.pools.parameters import Count, Kernel
from weir.pools.ranked import Asking, pool_neighbors
from weir.pools.registry import pool
from weir.slab import Slots, attention_mass

Frame = Literal["read", "stream"]
"""Places at which votes are computed: where attention reads keys, or the places in the stream."""


@pool("snap")
@dataclass(frozen=True)
class Snap(Asking):
    """Keep the newest tokens, and older ones that the last queries attend to most, by KV head.

    A vote is the share of its attention that a query gives to a token. It is summed over the last
    `window` queries and over the query heads of the KV head's group. Tokens of the window are kept
    without votes; if a pool before this one holds them, all slots are for others. Among equal
    pooled votes, a token's votes before pooling decide, and then its age: the older one is kept. A
    token that represents several gets the votes of all of them. Weights do not change.

    Attributes:
        budget: number of tokens to keep, including those of the window that arrive here.
        window: how many of the last queries vote.
        kernel: number of neighboring places in the stream over which votes are pooled, with the
            token's place in the middle: an odd number; 1 for no pooling.
        average: whether a token gets the average of its neighbors' votes, with evicted tokens
            counted as zero; otherwise their largest.
        frame: "read": a vote is a share of the attention that the model has computed, over
            everything that the query sees. "stream": a vote is a share of a softmax over only the
            tokens that are in the pool or arrive at it, with keys at their places in the stream.
    """

    needs_shares = False

    budget: int
    window: Count = 32
    kernel: Kernel = 7
    average: bool = False
    frame: Frame = "read"

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse a window that leaves no slot to vote on."""
        inside = self._inside(before)
        if self.budget <= inside:
            raise WeirError(
                f"budget of snap must be at least {inside + 1}, because the newest {inside} "
                f"tokens that reach it are always kept, got {self.budget}. Use a larger budget, a "
                f"smaller window, or put recent({self.window}) before it."
            )

    def fixed(self, before: tuple[Pool, ...]) -> int:
        """Return the number of window tokens that arrive here, all of which each layer keeps."""
        return self._inside(before)

    def _inside(self, before: tuple[Pool, ...]) -> int:
        """Count the tokens of the window that no pool before this one holds."""
        inside = self.window
        for place, earlier in enumerate(before):
            if earlier.keeps_run and all(pool.in_order for pool in before[:place]):
                newest = earlier.slots()
                inside -= self.window if newest is None else newest
        return max(0, inside)

    def score(self, slots: Slots, fold: Fold) -> tuple[Tensor, Tensor]:
        """Return each token's votes, after and before pooling. The window is kept without votes."""
        in_window = slots.position >= fold.next[:, None, None] - self.window
        votes = self._votes(slots, fold).masked_fill(in_window | ~slots.held, 0.0)
        score = pool_neighbors(votes, slots.position, self.kernel, average=self.average)
        return score.masked_fill(in_window, torch.inf), votes

    def _votes(self, slots: Slots, fold: Fold) -> Tensor:
        """Sum the attention of the window's queries to each slot [batch, kv_heads, slots]."""
        if self.frame == "read":
            return fold.observed.received(slots, self.window)
        assert fold.queries is not None
        queries = fold.queries[:, :, :, -self.window :]
        ahead = fold.next[:, None, None, None, None]
        back = torch.arange(queries.shape[3], 0, -1, device=queries.device)
        place = ahead - back[:, None]
        position = slots.position[:, :, None, None]
        sees = (position >= 0) & (position <= place)
        bias = torch.zeros(sees.shape, device=sees.device).masked_fill_(~sees, -torch.inf)
        if fold.alibi is not None:
            far = torch.iinfo(position.dtype).max
            held = slots.position
            first = held.masked_fill(held < 0, far).amin(dim=2, keepdim=True)
            heads = held.shape[1]
            bias = bias + fold.alibi.bias(held, heads, first, ahead[:, :, :, 0, 0] - 1)
        return attention_mass(queries, slots.keys, slots.b, fold.form, bias)
