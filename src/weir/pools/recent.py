"""A sliding window: keep the newest tokens.

This is the rolling part of StreamingLLM (Xiao et al. 2024, arXiv:2309.17453, section 3.2). Alone,
it is window attention (Beltagy et al. 2020, "Longformer"), the baseline that fails in the paper on
StreamingLLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.errors import WeirError
from weir.pools.base import Fold, Pool
from weir.pools.parameters import Count
from weir.pools.registry import pool
from weir.slab import Slots


@pool("recent")
@dataclass(frozen=True)
class Recent(Pool):
    """Keep the newest tokens that arrive. Older ones overflow.

    This is the sliding window of StreamingLLM (Xiao et al. 2024, section 3.2).

    Attributes:
        n: number of tokens to keep; `none` for no limit.
    """

    drops = True
    is_stochastic = False
    keeps_run = True
    in_order = True

    n: Count | None

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse a window without a limit after pools that leave gaps."""
        if self.n is None and not all(pool.in_order for pool in before):
            raise WeirError(
                "recent(none) can only follow pools that pass on all tokens in order. Give it a "
                "limit, as in recent(252), or move it forward."
            )

    @property
    def ends_pipe(self) -> bool:
        """Whether there is no limit, so that no token overflows."""
        return self.n is None

    def slots(self) -> int | None:
        """Return the number of tokens kept; None if there is no limit."""
        return self.n

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Append the arrivals. The oldest tokens beyond `n` overflow."""
        both = fold.in_order(held, new)
        spill = 0 if self.n is None else max(0, len(both) - self.n)
        return both.part(spill, len(both)), both.part(0, spill)
