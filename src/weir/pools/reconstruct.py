"""Context reconstruction: keep tokens that the model needs to repeat the text it has read.

KVzip (Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction",
arXiv:2505.23416), section 3: after the prompt is read, the model is asked to repeat it. A slot's
score is the largest share of attention that it gets meanwhile, over all queries and over the query
heads of its group. In a stream, the second reading comes after each fold, chunk by chunk.
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
    """Keep the tokens with the most attention in a second reading of their chunk, separately for
    each KV head.

    The score is taken once, while the pools before this one still hold the chunk. They need as many
    slots for the newest tokens as a chunk has. The score is averaged over neighboring places. Among
    equal averages, the token's score decides, and then its age: the older one is kept. Weights are
    kept with their tokens.

    Attributes:
        n: number of tokens to keep.
        kernel: number of neighboring places in the stream over which scores are averaged, with the
            token's place in the middle: an odd number; 1 for no averaging.
    """

    is_stochastic = False
    needs_second_reading = True

    n: int
    kernel: Kernel = 5

    def score(self, slots: Slots, fold: Fold) -> tuple[Tensor, Tensor]:
        """Return the average around a token, and its score [batch, kv_heads, slots]."""
        assert slots.mass is not None
        own = slots.mass.masked_fill(~slots.held, 0.0)
        return pool_neighbors(own, slots.position, self.kernel, average=True), own
