"""The beginning of a stream stays, and each row says for itself how long that is.

What a conversation starts with, its system turn and the tools it names, is what every later answer
depends on, and no two conversations have as much of it. StreamingLLM (Xiao et al. 2024, section
3.2) keeps the same few first tokens of all; this keeps so many as a row's marks say (`Marks`).
"""

from __future__ import annotations

from dataclasses import dataclass

from weir.errors import WeirError
from weir.pools.base import Fold, Pool
from weir.pools.registry import pool
from weir.pools.sink import keep_first
from weir.slab import Slots


@pool("beginning")
@dataclass(frozen=True)
class Beginning(Pool):
    """Keep the tokens of the stream's beginning.

    Of a beginning that is longer than there are slots, the first tokens stay. A row that was not
    told how long its beginning is keeps `n` tokens, as `sink(n)` does.

    Attributes:
        n: how many at most.
    """

    in_order = True
    needs_marks = True

    n: int = 64

    def __post_init__(self) -> None:
        if self.n < 1:
            raise WeirError(f"beginning keeps at least 1 token, not {self.n}")

    def check(self, before: tuple[Pool, ...]) -> None:
        """Only what comes first can be kept as the beginning."""
        if before:
            raise WeirError(
                "beginning keeps the first tokens of the stream, so it stands first in a pipe"
            )

    def slots(self) -> int:
        """As many slots as the longest beginning may take."""
        return self.n

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Fill what the row's beginning still lacks; everything else flows on."""
        most = self.n if fold.beginning is None else min(self.n, fold.beginning)
        return keep_first(held, new, most)
