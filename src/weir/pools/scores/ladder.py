"""Ladders: old tokens are thinned out, other ones in each layer, to reach farther back together.

LaCache (Shi et al. 2025, "LaCache: Ladder-Shaped KV Caching for Efficient Long-Context Modeling of
Large Language Models", arXiv:2507.14204), section 3, and its released code: when there are too many
tokens, those of a group of neighbors go but for a few, and which few moves on with the layer, like
the rungs of a ladder. Groups are thinned from the oldest on, over and over. No key is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, SizedPool, find_outside, split
from weir.pools.registry import pool
from weir.slab import Slots

RUNG = "rung"
"""The name, in `Fold.state`, of the number of oldest tokens that this round has thinned."""


@pool("ladder")
@dataclass(frozen=True)
class Ladder(SizedPool):
    """Keep some of every few neighbors, other ones in each layer, ever fewer the older they are.

    Attributes:
        n: how many tokens are kept.
        keep: how many of a group stay. In LaCache's words the span is `keep / of` of the layers.
        of: how many neighbors a group has.
    """

    drops = True
    is_stochastic = False

    n: int
    keep: int = 1
    of: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.keep < self.of:
            raise WeirError(
                f"ladder keeps some of a group and not all, 1 to {self.of - 1} of {self.of}, not "
                f"{self.keep}"
            )
        if self.n < self.of:
            raise WeirError(
                f"ladder needs a slot for each token of a group, {self.of} or more, not {self.n}"
            )

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make the number of oldest tokens thinned in this round [batch, kv_heads, 1], int64."""
        batch, heads = like.position.shape[:2]
        return {RUNG: like.position.new_zeros(batch, heads, 1)}

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """See `Pool.wrong_state`."""
        return find_outside(state, rung=(0, self.n))

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Thin until all have room; what stays and what flows on lie from the oldest on."""
        both = fold.in_order(held, new)
        stays, rung = both.held, fold.state[RUNG]
        offset = fold.draws.layer % (self.of - self.keep + 1)
        while bool((stays.sum(dim=2) > self.n).any()):
            stays, rung = self._thinned(stays, rung, offset)
        fold.state[RUNG] = rung
        return split(both, stays, fold)

    def _thinned(self, stays: Tensor, rung: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Thin as many groups as needed, or as this round has: (tokens that are left, the rung).

        `offset` is that of those that stay, in a group.
        """
        count = stays.sum(dim=2, keepdim=True)
        drop = self.of - self.keep
        groups = ((count - self.n).clamp_min(0) + drop - 1) // drop
        groups = groups.minimum((count - rung) // self.of)
        behind = stays.cumsum(dim=2) - 1 - rung
        inside = (behind >= 0) & (behind < groups * self.of)
        place = behind % self.of - offset
        rung = rung + groups * self.keep
        # A round ends where no whole group is left; who has room waits where they are.
        count = count - groups * drop
        over = (count > self.n) & (count - rung < self.of)
        return stays & ~(inside & ((place < 0) | (place >= self.keep))), rung.where(~over, 0)
