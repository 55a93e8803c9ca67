"""Attention sinks: never evict the first tokens of the stream.

StreamingLLM (Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks",
arXiv:2309.17453), section 3.2: models put attention that they have no use for on the first tokens.
While these are kept, the softmax keeps the shape it was trained with.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.errors import WeirError
from weir.pools.base import Fold, Pool, SizedPool
from weir.pools.registry import pool
from weir.slab import Slots


@pool("sink")
@dataclass(frozen=True)
class Sink(SizedPool):
    """Keep the first tokens that arrive.

    These are the attention sinks of StreamingLLM (Xiao et al. 2024, section 3.2).

    Attributes:
        n: number of tokens to keep; 4 in the paper.
    """

    is_stochastic = False
    drops = True
    in_order = True

    n: int = 4

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse any place but the first, or the one after `beginning`."""
        if any(pool.name != "beginning" for pool in before):
            raise WeirError(
                "sink keeps the first tokens of the stream, so it must be the first pool of a "
                "pipe. Move it to the front."
            )

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Fill the free slots. All other tokens overflow."""
        return keep_first(held, new, self.n)


def keep_first(held: Slots, new: Slots, most: int) -> tuple[Slots, Slots]:
    """Return (kept, overflow), keeping the first `most` tokens that ever arrive."""
    free = most - len(held)
    if free <= 0:
        return held, new
    return held.join(new.part(0, free)), new.part(free, len(new))
