"""Context reconstruction: tokens that the model needs to repeat what it has read stay.

KVzip (Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
arXiv:2505.23416), section 3: once the prompt is read, the model is asked to repeat it, and a slot's
score is the largest share of attention that it gets meanwhile, over all queries and over the query
heads of its group. In a stream the second reading comes after each fold, chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weir.pools.base import Fold
from weir.pools.parameters import Kernel
from weir.pools.ranked import Ranked, pool_neighbors
from weir.pools.registry import pool
from weir.slab import Slots


@pool("reconstruct")
@dataclass(frozen=True)
class Reconstruct(Ranked):
    """Keep the tokens most attended to in a second reading of their chunk, each KV head its own.

    The score is taken once, while the pools in front still hold the chunk: they need as many slots
    for the newest tokens as a chunk has. It is averaged over neighboring places. Of equal scores a
    token's own decides, and then its age: the older stays. Weights stay with their tokens.

    Attributes:
        n: how many tokens are kept.
        kernel: over how many neighboring places of the stream scores are averaged, the token's own
            in the middle: an odd number; 1 for none.
    """

    is_stochastic = False
    needs_second_reading = True

    n: int
    kernel: Kernel = 5

    def score(self, slots: Slots, fold: Fold) -> tuple[Tensor, Tensor]:
        """Return (the average around a token, its own score) [batch, kv_heads, slots]."""
        assert slots.mass is not None
        own = slots.mass.masked_fill(~slots.held, 0.0)
        return pool_neighbors(own, slots.position, self.kernel, average=True), own
