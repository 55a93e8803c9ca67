"""Keep the header of the current turn until the next turn begins.

A chat template puts a few control tokens before an answer, such as `<|im_start|>assistant`, which
make the model answer and end its answer. This pool keeps them when a window evicts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.pools.base import Fold, Pool, SizedPool, split
from weir.pools.registry import pool
from weir.slab import Slots


@pool("header")
@dataclass(frozen=True)
class Header(SizedPool):
    """Keep the header of the current turn. A row's `Marks` say where it begins and how long it is.

    If the header is longer than the slots, its first tokens are kept. When another turn begins, the
    header of the previous turn overflows.

    Attributes:
        n: the most tokens to keep.
    """

    drops = True
    is_stochastic = False
    needs_marks = True
    heads_agree = True  # the place in the stream decides

    n: int = 16

    def fixed(self, before: tuple[Pool, ...]) -> int:
        """Return all slots, because a header is equally long in every layer."""
        return self.n

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Keep the tokens of the header, by their places. All others overflow."""
        both = held.join(new)
        stays = both.held & False
        if fold.turn is not None:
            after = both.position - fold.turn[:, None, None]
            stays = both.held & (after >= 0) & (after < min(self.n, fold.header))
        if not bool(stays[:, :, len(held) :].any()) and bool(stays[:, :, : len(held)].all()):
            return held, new
        return split(both, stays, fold)
