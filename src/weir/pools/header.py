"""The header of the running turn stays until the next turn begins.

A chat template puts a few control tokens in front of an answer, `<|im_start|>assistant`, say. They
are what makes the model answer, and end its answer; a window that is shorter than the answer loses
them on the way. Stands behind the window and takes what it lets go of.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.errors import WeirError
from weir.pools.base import Fold, Pool, split
from weir.pools.registry import pool
from weir.slab import Slots


@pool("header")
@dataclass(frozen=True)
class Header(Pool):
    """Keep the tokens that begin the running turn, where a row's marks say that is (`Marks`).

    Of a header that is longer than there are slots, the first tokens stay. When another turn
    begins, the tokens of the one before flow on.

    Attributes:
        n: how many at most.
    """

    needs_marks = True
    heads_agree = True  # a place in the stream decides

    n: int = 16

    def __post_init__(self) -> None:
        if self.n < 1:
            raise WeirError(f"header keeps at least 1 token, not {self.n}")

    def slots(self) -> int:
        """As many slots as the longest header may take."""
        return self.n

    def fixed(self, before: tuple[Pool, ...]) -> int:
        """All of them: a header is as long in every layer."""
        return self.n

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Keep what is of the header, by its place in the stream; everything else flows on."""
        both = held.join(new)
        stays = both.held & False
        if fold.turn is not None:
            after = both.position - fold.turn[:, None, None]
            stays = both.held & (after >= 0) & (after < min(self.n, fold.header))
        if not bool(stays[:, :, len(held) :].any()) and bool(stays[:, :, : len(held)].all()):
            return held, new
        return split(both, stays, fold)
