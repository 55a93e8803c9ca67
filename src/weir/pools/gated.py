"""Gates: tokens that a trained map expects to be needed stay.

KVzap (Jégou and Jeblick 2026, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning",
arXiv:2601.07891) and Fast KVzip (arXiv:2601.17668): a small map a layer, trained on the model at
hand, predicts the logarithm of KVzip's score (`kvzip`) without a repetition. Theirs reads
hidden states; this one reads the keys and values of all heads, which lie in the slots anyway.
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
"""The largest logarithm of a score; one above 0 is no share, but still an order."""


@pool("gated")
@dataclass(frozen=True)
class Gated(Tallied):
    """Keep the tokens with the highest score by the layer's gate, each KV head its own.

    A token is judged once, when it arrives. Its score is averaged over neighboring places. Of equal
    scores a token's own decides, and then its age: the older stays. Weights stay with their tokens.

    Attributes:
        n: how many tokens are kept.
        kernel: over how many neighboring places of the stream scores are averaged, the token's own
            in the middle: an odd number; 1 for none.
    """

    needs_gates = True

    n: int
    kernel: Kernel = 5

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse arrivals that differ between heads."""
        for earlier in before:
            if not earlier.heads_agree:
                raise WeirError(
                    "gated reads the keys and values of all heads of a token, and "
                    f"{earlier.name} in front of it passes on other tokens in each; put gated first"
                )

    def first_tally(self, new: Slots, fold: Fold) -> Tensor:
        """Return the score that the gate predicts [batch, kv_heads, slots], float32."""
        read = fold.read
        if read is None or read.gate is None:
            raise WeirError(
                "gated needs gates that are trained for this model: weir calibrate --gates"
            )
        return read.gate(read.unrotated(new), new.values).clamp_max(MOST).exp()

    def tally(self, slots: Slots, before: Tensor, fold: Fold) -> Tensor:
        """Return the numbers as they are."""
        return before

    def score(self, slots: Slots, fold: Fold) -> tuple[Tensor, Tensor]:
        """Return (the average around a token, its own score) [batch, kv_heads, slots]."""
        own = fold.state[TALLY]
        return pool_neighbors(own, slots.position, self.kernel, average=True), own
