"""Keep the beginning of a stream, whose length each row's marks give.

StreamingLLM (Xiao et al. 2024, arXiv:2309.17453, section 3.2) keeps the same few first tokens of
every stream. This pool keeps as many as `Marks` gives, such as a system turn and its tools.
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.errors import WeirError
from weir.pools.base import Fold, Pool, SizedPool
from weir.pools.registry import pool
from weir.pools.sink import keep_first
from weir.slab import Slots


@pool("beginning")
@dataclass(frozen=True)
class Beginning(SizedPool):
    """Keep the tokens of the stream's beginning.

    If the beginning is longer than the slots, its first tokens are kept. A row whose marks do not
    give the length of its beginning keeps `n` tokens, as `sink(n)` does.

    Attributes:
        n: the most tokens to keep.
    """

    drops = True
    in_order = True
    is_stochastic = False
    needs_marks = True

    n: int = 64

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse any place but the first."""
        if before:
            raise WeirError(
                "beginning keeps the first tokens of the stream, so it must be the first pool of "
                "a pipe. Move it to the front."
            )

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Take the tokens that are still missing from the beginning. All others overflow."""
        most = self.n if fold.beginning is None else min(self.n, fold.beginning)
        return keep_first(held, new, most)
