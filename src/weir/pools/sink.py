"""Attention sinks: the first tokens of the stream stay for ever.

StreamingLLM (Xiao et al. 2024), section 3.2: models put attention they have no use for on the first
tokens; while these stay, the softmax keeps the shape it was trained with.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.errors import WeirError
from weir.pools.base import Fold, Pool
from weir.pools.registry import pool
from weir.slab import Slots


@pool("sink")
@dataclass(frozen=True)
class Sink(Pool):
    """Keep the first tokens that arrive; the paper keeps 4.

    Attributes:
        n: how many.
    """

    in_order = True

    n: int = 4

    def __post_init__(self) -> None:
        if self.n < 1:
            raise WeirError(f"sink keeps at least 1 token, not {self.n}")

    def check(self, before: tuple[Pool, ...]) -> None:
        """Only what comes first can be kept as the first, or what comes behind the beginning."""
        if any(pool.name != "beginning" for pool in before):
            raise WeirError(
                "sink keeps the first tokens of the stream, so it stands first in a pipe"
            )

    @property
    def is_stochastic(self) -> bool:
        """It draws nothing."""
        return False

    def slots(self) -> int:
        """As many slots as tokens are kept."""
        return self.n

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Fill what is free; everything else flows on."""
        return keep_first(held, new, self.n)


def keep_first(held: Slots, new: Slots, most: int) -> tuple[Slots, Slots]:
    """(kept, overflow) where the first `most` tokens that ever arrive stay."""
    free = most - len(held)
    if free <= 0:
        return held, new
    return held.join(new.part(0, free)), new.part(free, len(new))
