"""Keep tokens that a caller has marked, such as the output of a tool, until they are unmarked.

A row's `Marks` say where they are in its stream. This pool takes them as they leave the window, and
stores them in the slots that the stream's beginning leaves free.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.errors import WeirError
from weir.pools.base import Fold, Pool, SizedPool, split
from weir.pools.beginning import Beginning
from weir.pools.registry import pool
from weir.slab import Slots


@pool("kept")
@dataclass(frozen=True)
class Kept(SizedPool):
    """Keep the tokens at the places that a row's `Marks` give, in the slots of `beginning`.

    Both pools together hold at most `n` tokens, and the beginning has priority. If more tokens are
    marked than there are free slots, those that came first stay. Tokens that are no longer marked
    overflow.

    Attributes:
        n: how many slots both pools share; the same number as in `beginning`.
    """

    drops = True
    is_stochastic = False
    needs_marks = True
    shares_slots = True
    heads_agree = True  # a place in the stream decides

    n: int = 64

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse a pipe without a beginning of the same size."""
        if not before or not isinstance(before[0], Beginning) or before[0].n != self.n:
            raise WeirError(
                f"kept({self.n}) holds tokens in the slots that the beginning leaves free, so its "
                f"pipe must begin with beginning({self.n})"
            )

    def fixed(self, before: tuple[Pool, ...]) -> int:
        """Return all slots, because marked tokens take the same number in every layer."""
        return self.n

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Keep the marked tokens, by their places. All others overflow."""
        if fold.kept is None and not len(held):
            return held, new
        both = held.join(new)
        stays = both.held & False
        if fold.kept is not None and fold.beginning is not None:
            place = both.position[..., None]
            start, stop = fold.kept[:, None, None].unbind(dim=4)
            stays = both.held & ((place >= start) & (place < stop)).any(dim=3)
            stays &= stays.cumsum(dim=2) <= self.n - min(self.n, fold.beginning)
        if not bool(stays[:, :, len(held) :].any()) and bool(stays[:, :, : len(held)].all()):
            return held, new
        return split(both, stays, fold)
