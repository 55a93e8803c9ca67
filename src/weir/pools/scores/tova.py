"""Eviction by the last query alone: the tokens it attends to least go first.

TOVA (Oren, Hassid, Yarden, Adi and Schwartz 2024, "Transformers are Multi-State RNNs",
arXiv:2401.06104), section 3.2: at each step the token with the lowest attention from the newest
query, averaged over the heads of the layer, is dropped; recency is not favored in itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, Pool
from weir.pools.ranked import Ranked
from weir.pools.registry import pool
from weir.slab import Slots


@pool("tova")
@dataclass(frozen=True)
class Tova(Ranked):
    """Keep the tokens that the last query attends to most, the same in all heads of a layer.

    With `chunk=1` the cache asks after every token, as the paper does. Where the heads of a layer
    are shared out over processes, those of each process agree.

    Attributes:
        n: how many tokens are kept.
        per_head: each KV head its own, by the average over its group.
    """

    needs_queries = 1

    n: int
    per_head: bool = False

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse to average over heads that hold different tokens."""
        own = [earlier.name for earlier in before if not earlier.heads_agree]
        if own and not self.per_head:
            raise WeirError(
                f"the heads of a layer keep the same tokens in tova, and behind {own[0]} "
                "each has its own; write tova(…, per_head=true), or put it behind sink and recent"
            )

    @property
    def heads_agree(self) -> bool:
        """Unless each is to have its own."""
        return not self.per_head

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """The last query's attention, averaged [batch, kv_heads, slots]."""
        share = fold.observed.attention(slots, 1)[:, :, :, 0]
        if self.per_head:
            return share.mean(dim=2)
        return share.mean(dim=(1, 2), keepdim=True)[:, :, 0].expand_as(slots.a)
