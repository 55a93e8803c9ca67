"""Keep tokens that any query has needed, ranked by their largest attention and their contribution.

DefensiveKV (Feng et al. 2025, "Taming the Fragility of KV Cache Eviction in LLM Inference",
arXiv:2510.13334), section 4: a token is ranked by the largest attention that a query gave it, its
*peak*, because a single query may need it. The peak is pooled over neighbors, is at least the mean
over all tokens, and is multiplied by the length of the value after the output projection
(CriticalKV, arXiv:2502.03805). The paper ranks a prompt once; in a stream, peaks are carried from
fold to fold and fade. Tokens with the widest values are kept whatever their score (VaSE,
arXiv:2606.03928).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weir.pools.base import FROM_0, Fold, find_outside
from weir.pools.parameters import Count, Kernel, Natural
from weir.pools.ranked import TALLY, Asking, Tallied, pool_neighbors, select_highest
from weir.pools.registry import pool
from weir.slab import Slots


@pool("defend")
@dataclass(frozen=True)
class Defend(Asking, Tallied):
    """Keep the tokens with the highest peaks of attention, by the lengths of their values.

    A token's peak is the largest share of attention that it got from one of the last `window`
    queries of any fold, and of any query head of the group. A peak halves with every `half_life`
    tokens. Each KV head ranks tokens separately, by the largest peak around them, but at least the
    mean of all, times the length of their value after the output projection (mean over the group).
    Among equal scores, the token's peak decides, and then its age: the older one is kept. Weights
    are kept with their tokens: a token that represents several gets the attention of all of them.

    Attributes:
        n: number of tokens to keep.
        window: how many of the last queries of each fold may set a peak.
        half_life: tokens of the stream after which a peak counts half; none for never.
        kernel: number of neighboring places in the stream over which peaks are pooled, with the
            token's place in the middle: an odd number; 1 for no pooling.
        wide: how many tokens are kept because the numbers of their values have the widest range,
            from the smallest to the largest, whatever their score; at most half of the slots.
        value: whether scores are multiplied by the lengths of values.
        average: whether a token gets the average of its neighbors' peaks, as in the authors' code;
            otherwise their largest.
    """

    n: int
    window: Count = 64
    half_life: Count | None = 2048
    kernel: Kernel = 5
    wide: Natural = 4
    value: bool = True
    average: bool = False

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make the peak of each slot, and `seen`, the tokens seen at the last fold."""
        return {**super().state(like), "seen": like.position.new_zeros(like.position.shape[:2])}

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """See `Pool.wrong_state`."""
        return find_outside(state, tally=FROM_0, seen=(0, ahead))

    def tally(self, slots: Slots, before: Tensor, fold: Fold) -> Tensor:
        """Return the faded peak of each token [batch, kv_heads, slots], float32."""
        shares = self.attention(slots, fold)
        if self.half_life is not None:
            since = (fold.seen[:, None] - fold.state["seen"]).double()
            before = before * torch.exp2(-since / self.half_life)[:, :, None].float()
        fold.state["seen"] = fold.seen[:, None].expand_as(fold.state["seen"]).clone()
        return before.maximum(shares.amax(dim=(2, 3)))

    def score(self, slots: Slots, fold: Fold) -> tuple[Tensor, Tensor]:
        """Return the score, and a token's peak [batch, kv_heads, slots]."""
        peak = fold.state[TALLY]
        there = slots.held.sum(dim=2, keepdim=True).clamp_min(1)
        floor = peak.double().sum(dim=2, keepdim=True) / there
        score = pool_neighbors(peak, slots.position, self.kernel, average=self.average)
        score = score.maximum(floor)
        if self.value:
            score = score * fold.observed.lengths(slots.values).mean(dim=2)
        wide = min(self.wide, self.n // 2)
        if wide:
            reach = (slots.values.amax(dim=3) - slots.values.amin(dim=3)).float()
            score = score.masked_fill(select_highest(wide, slots.held, reach), torch.inf)
        return score, peak
