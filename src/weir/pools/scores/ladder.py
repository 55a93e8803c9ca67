"""Ladders: thin out old tokens, different ones from layer to layer, so that the layers together
reach farther back.

LaCache (Shi et al. 2025, "LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling of
Large Language Models", arXiv:2507.14204), section 3, and its released code: when there are too many
tokens, all but a few of a group of neighbors are evicted. Which few are kept shifts with the layer,
like the rungs of a ladder. Groups are thinned from the oldest on. When all have been thinned, the
next round begins at the oldest again. Keys are not read.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, SizedPool, find_outside, split
from weir.pools.registry import pool
from weir.slab import Slots

RUNG = "rung"
"""The name, in `Fold.state`, of the number of oldest tokens that have survived this round so far.
"""


@pool("ladder")
@dataclass(frozen=True)
class Ladder(SizedPool):
    """Keep some of every few neighbors, shifted from layer to layer, and fewer of older tokens.

    Attributes:
        n: number of tokens to keep.
        keep: how many of a group are kept. LaCache's span, the number of layers in which a token is
            kept, corresponds to the number of layers times `keep / of`.
        of: number of neighbors in a group.
    """

    drops = True
    is_stochastic = False

    n: int
    keep: int = 1
    of: int = 2

    def __post_init__(self) -> None:
        if self.of < 2:
            raise WeirError(f"of of ladder must be at least 2, got {self.of}")
        if not 1 <= self.keep < self.of:
            raise WeirError(
                f"keep of ladder must be at least 1 and less than of={self.of}, so that only a "
                f"part of a group is kept, got {self.keep}"
            )
        if self.n < self.of:
            raise WeirError(
                f"ladder needs a slot for each token of a group, at least {self.of}, got {self.n}"
            )

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make the number of oldest tokens that have survived this round so far [batch, kv_heads,
        1], int64.
        """
        batch, heads = like.position.shape[:2]
        return {RUNG: like.position.new_zeros(batch, heads, 1)}

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """See `Pool.wrong_state`."""
        return find_outside(state, rung=(0, self.n))

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Thin until all tokens fit. The kept and the evicted tokens both have the oldest first."""
        both = fold.in_order(held, new)
        stays, rung = both.held, fold.state[RUNG]
        offset = fold.draws.layer % (self.of - self.keep + 1)
        while bool((stays.sum(dim=2) > self.n).any()):
            stays, rung = self._thinned(stays, rung, offset)
        fold.state[RUNG] = rung
        return split(both, stays, fold)

    def _thinned(self, stays: Tensor, rung: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Thin as many groups as needed, or as are left in this round. Returns the remaining tokens
        and the new rung.

        `offset` is the place in a group where the tokens that stay begin.
        """
        count = stays.sum(dim=2, keepdim=True)
        drop = self.of - self.keep
        groups = ((count - self.n).clamp_min(0) + drop - 1) // drop
        groups = groups.minimum((count - rung) // self.of)
        behind = stays.cumsum(dim=2) - 1 - rung
        inside = (behind >= 0) & (behind < groups * self.of)
        place = behind % self.of - offset
        rung = rung + groups * self.keep
        # A round ends when no whole group is left. Heads with room keep their rung.
        count = count - groups * drop
        over = (count > self.n) & (count - rung < self.of)
        return stays & ~(inside & ((place < 0) | (place >= self.keep))), rung.where(~over, 0)
