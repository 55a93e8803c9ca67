"""Attention matching: the tokens that stay weigh so that the last queries miss nothing.

Attention Matching (arXiv:2602.16284), section 3: of many keys and values a few are kept, each with
a log-weight that is fitted by least squares, so that sampled queries give all of what is kept the
attention that they gave all there was. There it is done once, for a whole context and with
thousands of queries. Here it is done at every fold, with the queries that wait for it; so weights
are held close to what they were, and what is gone is forgotten by and by.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weir.errors import WeirError
from weir.pools.around import Around
from weir.pools.base import Fold, Pool
from weir.pools.match.fitting import fitted
from weir.pools.registry import pool
from weir.slab import Slots

MOST = 3.0
"""No log-weight is larger, or smaller than its negative: the paper's box."""
LEAST_PULL = 1e-3
"""Times the mean of a diagonal it is what rounding may be off by, of sums over 8,192 slots."""


@pool("match")
@dataclass(frozen=True)
class Match(Around):
    """Keep what another pool keeps, and weigh it for what that lets go of. Experimental.

    Nothing is weighed while there is room, and nothing flows on: it is stood for.

    Attributes:
        pool: says who stays; it weighs nothing by itself.
        window: so many of the last queries are asked.
        half_life: arrivals after which log-weights are half of what they were; none for never.
        pull: how strongly a weight is held to what it was.
    """

    ends_pipe = True
    needs_shares = True

    pool: Pool
    window: int = 64
    half_life: int | None = 64
    pull: float = 10.0

    def __post_init__(self) -> None:
        if self.pool.ends_pipe or self.pool.weighs or self.pool.slots() is None:
            raise WeirError(
                "match goes around a pool that says who stays, so many and no more, as in "
                f"match(snap(64)); {self.pool.name} keeps all, or weighs what it keeps by itself"
            )
        if self.window < 1:
            raise WeirError(f"match asks the last query at least, not {self.window}")
        if self.half_life is not None and self.half_life < 1:
            raise WeirError(
                f"log-weights of match are half of what they were after 1 arrival or more, not "
                f"{self.half_life}; none for never"
            )
        if not LEAST_PULL <= self.pull < float("inf"):
            raise WeirError(
                f"match pulls weights with a number from {LEAST_PULL:g} on, or rounding would "
                f"weigh, not {self.pull:g}"
            )

    @property
    def needs_queries(self) -> int:
        """The window's, or those of the pool that says who stays."""
        return max(self.window, self.pool.needs_queries)

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """The pool says who stays; what these are fitted to is all that was there."""
        if len(held) + len(new) <= self.slots() or fold.read is None:
            return self.pool.fold(held, new, fold)
        held = self._faded(held, new)
        kept, _ = self.pool.fold(held, new, fold)
        weight = fitted(fold.read, held.join(new), kept, self.window, self.pull, MOST)
        more = weight.log()
        return kept.weighed(kept.a + more, kept.b + more), new.part(0, 0)

    def _faded(self, held: Slots, new: Slots) -> Slots:
        """What is held, its log-weights closer to 0 by what has arrived."""
        if self.half_life is None:
            return held
        left = 0.5 ** (new.held.sum(dim=2, keepdim=True) / self.half_life)
        a, b = ((t * left).masked_fill(~held.held, -torch.inf) for t in (held.a, held.b))
        return held.weighed(a, b)
