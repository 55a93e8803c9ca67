"""Keep keys that point away from the others, as BalanceKV does to find needles in a haystack.

BalanceKV's needle variant (Kochetkova et al. 2025, arXiv:2502.07861, section 4.2, and its released
code): before anything is balanced, tokens whose keys point away from those around them are set
apart, because no other token can represent them. The choice is not random, so the estimates of
pools after this one stay unbiased. In the released code, one layer chooses for all later layers.
Here each KV head of each layer chooses separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.errors import WeirError, in_words
from weir.pools.base import FINITE, Fold, SizedPool, find_outside, gather_kept, split
from weir.pools.parameters import Bounds, Cosine, Natural
from weir.pools.ranked import pool_neighbors, select_highest
from weir.pools.registry import pool
from weir.slab import Slots

PIECE = 64
"""Arrivals compared at a time, to limit the memory for a whole prompt."""


@pool("outliers")
@dataclass(frozen=True)
class Outliers(SizedPool):
    """Keep the tokens whose keys point away most from the keys before them.

    The measure is the cosine of a key with the mean of the latest keys, including itself, when it
    arrives. Of tokens with equal cosines, the older one is kept. Weights do not change.

    Attributes:
        n: number of tokens to keep.
        over: approximate number of keys in the mean: each counts 1 / over less than the next. The
            authors' code compares a token with a block of 256.
        dilate: number of neighbors of a token on each side that are kept as if they pointed away as
            far; 25 in the authors' code. The newest `dilate` tokens wait in the pool for their
            neighbors.
        below: tokens with a larger cosine than this are not kept, even if there is room; 0 in the
            authors' code. None to keep as many as there are slots.
    """

    drops = True
    is_stochastic = False

    n: int
    over: Annotated[int, Bounds(2)] = 1024
    dilate: Natural = 0
    below: Cosine | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dilate >= self.n:
            raise WeirError(
                f"outliers needs at least {self.dilate + 1} slots, because the newest "
                f"{in_words(self.dilate, 'token')} {'waits' if self.dilate == 1 else 'wait'} for "
                f"neighbors, got {self.n}. Use more slots or a smaller dilate."
            )

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make the state, all float64.

        It is `sum`, the fading sum of all keys that came [batch, kv_heads, key_dim], and `away`, 1
        minus the cosine of each slot's token [batch, kv_heads, n].
        """
        batch, heads, _, dim = like.keys.shape
        nothing = like.keys.new_zeros((batch, heads, dim), dtype=torch.float64)
        return {"sum": nothing, "away": nothing.new_zeros((batch, heads, self.n))}

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """See `Pool.wrong_state`."""
        return find_outside(state, sum=FINITE, away=FINITE)

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Compare arrivals with the mean. The kept and the evicted tokens both have the oldest
        first.
        """
        if len(new) == 0:
            return held, new
        known = fold.state["away"][:, :, : len(held)]
        fold.state["sum"], away = measure_away(new, fold.state["sum"], 1 - 1 / self.over)
        both, away = held.join(new), torch.cat([known, away], dim=2)
        order = both.position.argsort(dim=2, stable=True)
        both, away = both.take_sorted(order), away.gather(2, order)
        stays = self._choose(both, away)
        fold.state["away"] = gather_kept(away, stays, self.n)
        return split(both, stays)

    def _choose(self, slots: Slots, away: Tensor) -> Tensor:
        """Choose the tokens that stay [batch, kv_heads, slots], bool.

        What counts is how far the keys around a token point away, then its own key, then its age.
        `slots` are in order from the oldest on.
        """
        score = pool_neighbors(away, slots.position, 2 * self.dilate + 1, average=False)
        if self.below is not None:
            score = score.masked_fill(score < 1 - self.below, -torch.inf)
        newest = slots.held.flip(2).cumsum(dim=2).flip(2) <= self.dilate
        return select_highest(self.n, slots.held, score.masked_fill(newest, torch.inf), away)


def measure_away(new: Slots, total: Tensor, fade: float) -> tuple[Tensor, Tensor]:
    """Measure how far each key points away from those before it, one after the other.

    `total` is the sum of the keys so far [batch, kv_heads, key_dim]. It is multiplied by `fade`
    whenever a key is added. Returns the new sum, and 1 minus the cosine of each key with the sum
    that includes it [batch, kv_heads, slots], between 0 and 2, in float64; 0 for empty slots.
    """
    parts = []
    for start in range(0, len(new), PIECE):
        piece = new.part(start, start + PIECE)
        keys = piece.keys.double().masked_fill(~piece.held[..., None], 0.0)
        left = fade ** piece.held.cumsum(dim=2)[..., None].double()
        sums = left * (total[:, :, None] + (keys / left).cumsum(dim=2))
        total = sums[:, :, -1]
        cosine = F.cosine_similarity(keys, sums, dim=3, eps=1e-30)
        cosine = cosine.masked_fill(~piece.held, 1.0)  # an empty slot is far from nothing
        # Rounded, so that cosines that differ only by rounding of their sums are ties.
        parts.append((1 - cosine).clamp(0, 2).round(decimals=9))
    return total, torch.cat(parts, dim=2)
