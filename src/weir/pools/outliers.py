"""Keys that point away from the others stay, exactly: what BalanceKV keeps for needles.

BalanceKV's needle variant (Kochetkova et al. 2025, section 4.2 and its released code): before
anything is balanced, tokens whose keys point away from those around them are kept as they are. A
half holds such a token or does not, and no other speaks for it; the rest are alike, and halves of
them answer alike. Who stays is no matter of chance, so what is unbiased behind this pool remains
so. In the released code one layer chooses for all that follow it; here each KV head of each layer
chooses for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, Pool, gather_kept, split
from weir.pools.ranked import pool_neighbors, select_highest
from weir.pools.registry import pool
from weir.slab import Slots

PIECE = 64
"""Arrivals looked at together; a whole prompt comes in pieces."""


@pool("outliers")
@dataclass(frozen=True)
class Outliers(Pool):
    """Keep the tokens whose keys point away most from the keys that came before them.

    How far a key points away is said by its cosine with the mean of the latest keys, its own among
    them, as it arrives. Where it is the same, the older token stays. Weights stay as they came.

    Attributes:
        n: how many slots.
        over: the mean is over about so many keys: each counts 1 / over less than the next. The
            authors' code compares a token with a block of 256.
        dilate: so many neighbors of a token on each side stay as if they pointed away as far; 25
            in the authors' code. The newest `dilate` tokens wait in the pool for theirs to come.
        below: who has a larger cosine does not stay, though there may be room; 0 in the authors'
            code. None to keep as many as there are slots.
    """

    n: int
    over: int = 1024
    dilate: int = 0
    below: float | None = None

    def __post_init__(self) -> None:
        for name, at_least in (("n", 1), ("over", 2), ("dilate", 0)):
            if getattr(self, name) < at_least:
                given = getattr(self, name)
                raise WeirError(f"{name} of outliers is {at_least} or more, not {given}")
        if self.dilate >= self.n:
            raise WeirError(
                f"the newest {self.dilate} tokens wait for their neighbors in outliers, so it "
                f"needs {self.dilate + 1} slots or more, not {self.n}, or a smaller dilate"
            )
        if self.below is not None and not -1 <= self.below <= 1:
            raise WeirError(f"below of outliers is a cosine, from -1 to 1, not {self.below}")

    def slots(self) -> int:
        """As many as it was given."""
        return self.n

    def state(self, like: Slots) -> dict[str, Tensor]:
        """`sum`, the sum of all keys that came, the older the fainter [batch, kv_heads, key_dim],
        and `away`, 1 less the cosine of each slot's token [batch, kv_heads, n]; both float64.
        """
        batch, heads, _, dim = like.keys.shape
        nothing = like.keys.new_zeros((batch, heads, dim), dtype=torch.float64)
        return {"sum": nothing, "away": nothing.new_zeros((batch, heads, self.n))}

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """Why tensors cannot be its state; see `Pool.wrong_state`."""
        wrong = [name for name, t in state.items() if not bool(t.isfinite().all())]
        return f"{wrong[0]} is not finite" if wrong else None

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Compare arrivals with the mean; both what stays and what flows on lie by age."""
        if len(new) == 0:
            return held, new
        known = fold.state["away"][:, :, : len(held)]
        fold.state["sum"], away = pointing_away(new, fold.state["sum"], 1 - 1 / self.over)
        both, away = held.join(new), torch.cat([known, away], dim=2)
        order = both.position.argsort(dim=2, stable=True)
        both, away = both.take_sorted(order), away.gather(2, order)
        stays = self._stays(both, away)
        fold.state["away"] = gather_kept(away, stays, self.n)
        return split(both, stays)

    def _stays(self, slots: Slots, away: Tensor) -> Tensor:
        """Who stays of tokens that lie by age [batch, kv_heads, slots], bool.

        By the neighborhood, then by a token's own key, then by age.
        """
        score = pool_neighbors(away, slots.position, 2 * self.dilate + 1, average=False)
        if self.below is not None:
            score = score.masked_fill(score < 1 - self.below, -torch.inf)
        newest = slots.held.flip(2).cumsum(dim=2).flip(2) <= self.dilate
        return select_highest(self.n, slots.held, score.masked_fill(newest, torch.inf), away)


def pointing_away(new: Slots, total: Tensor, fade: float) -> tuple[Tensor, Tensor]:
    """How far each key points away from those before it, taken one after the other.

    Args:
        new: the tokens.
        total: the sum of the keys so far [batch, kv_heads, key_dim], float64.
        fade: what is left of it when the next key comes.

    Returns:
        (the sum from now on; 1 less the cosine of each key with the sum as it came
        [batch, kv_heads, slots], between 0 and 2), float64.
    """
    parts = []
    for start in range(0, len(new), PIECE):
        piece = new.part(start, start + PIECE)
        keys = piece.keys.double().masked_fill(~piece.held[..., None], 0.0)
        left = fade ** piece.held.cumsum(dim=2)[..., None].double()
        sums = left * (total[:, :, None] + (keys / left).cumsum(dim=2))
        total = sums[:, :, -1]
        cosine = F.cosine_similarity(keys, sums, dim=3, eps=1e-30)
        # Rounded, so that cosines that differ by the rounding of their sums alone are ties.
        parts.append((1 - cosine).clamp(0, 2).round(decimals=9))
    return total, torch.cat(parts, dim=2)
