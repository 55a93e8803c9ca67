"""Gates: keep tokens that a trained map expects to be needed.

KVzap (Jégou and Jeblick 2026, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning",
arXiv:2601.07891) and Fast KVzip (arXiv:2601.17668): a small map per layer, trained on the model,
predicts the logarithm of KVzip's score (`kvzip`) without a repetition. The maps of these papers
read hidden states. weir's map, the layer's *gate*, reads the keys and values of all heads, which
are already in the slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, Pool
from weir.pools.parameters import Kernel
from weir.pools.ranked import TALLY, Tallied, pool_neighbors
from weir.pools.registry import pool
from weir.slab import Slots

MOST = 20.0
"""The largest logarithm of a score. A score whose logarithm is above 0 is no longer a share of
attention, but still gives an order.
"""


@pool("gated")
@dataclass(frozen=True)
class Gated(Tallied):
    """Keep the tokens to which the layer's trained gate gives the highest scores, separately for
    each KV head.

    A token is scored once, when it arrives. Its score is averaged over neighboring places. Among
    equal averages, the token's score decides, and then its age: the older one is kept. Weights are
    kept with their tokens.

    Attributes:
        n: number of tokens to keep.
        kernel: number of neighboring places in the stream over which scores are averaged, with the
            token's place in the middle: an odd number; 1 for no averaging.
    """

    needs_gates = True

    n: int
    kernel: Kernel = 5

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse arrivals that differ between heads."""
        for earlier in before:
            if not earlier.heads_agree:
                raise WeirError(
                    f"gated reads the keys and values of a token in all heads, but {earlier.name} "
                    "before it passes on different tokens in each head. Put gated first."
                )

    def first_tally(self, new: Slots, fold: Fold) -> Tensor:
        """Return the score that the gate predicts [batch, kv_heads, slots], float32."""
        read = fold.read
        if read is None or read.gate is None:
            raise WeirError(
                "gated needs gates that were trained for this model. Train them with weir "
                "calibrate --gates."
            )
        return read.gate(read.unrotated(new), new.values).clamp_max(MOST).exp()

    def tally(self, slots: Slots, before: Tensor, fold: Fold) -> Tensor:
        """Return the scores unchanged, because a token is scored only when it arrives."""
        return before

    def score(self, slots: Slots, fold: Fold) -> tuple[Tensor, Tensor]:
        """Return the average around a token, and its score [batch, kv_heads, slots]."""
        own = fold.state[TALLY]
        return pool_neighbors(own, slots.position, self.kernel, average=True), own
