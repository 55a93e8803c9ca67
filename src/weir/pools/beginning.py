"""The beginning of a stream stays, as long as each row's marks say it is.

StreamingLLM (Xiao et al. 2024, arXiv:2309.17453, section 3.2) keeps the same few first tokens of
every stream; this pool keeps as many as `Marks` says, such as a system turn and its tools.
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

    If it is longer than there are slots, its first tokens stay. A row whose marks do not say how
    long its beginning is keeps `n` tokens, as `sink(n)` does.

    Attributes:
        n: how many tokens are kept at most.
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
                "beginning keeps the first tokens of the stream, so it stands first in a pipe"
            )

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Take the tokens that the beginning still lacks; everything else flows on."""
        most = self.n if fold.beginning is None else min(self.n, fold.beginning)
        return keep_first(held, new, most)
