"""Eviction by the last query alone: evict the tokens it attends to least.

TOVA (Oren, Hassid, Yarden, Adi and Schwartz 2024, "Transformers are Multi-State RNNs",
arXiv:2401.06104), section 3.2: at each step, the token with the lowest attention from the newest
query, averaged over the heads of the layer, is dropped. Recency as such is not favored.
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

    With `chunk=1`, the cache ranks after every token, as the paper does. If the heads of a layer
    are divided among processes, only the heads in the same process keep the same tokens.

    Attributes:
        n: number of tokens to keep.
        per_head: whether each KV head chooses separately, by the average over its group.
    """

    needs_queries = 1

    n: int
    per_head: bool = False

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse to average over heads that hold different tokens."""
        own = [earlier.name for earlier in before if not earlier.heads_agree]
        if own and not self.per_head:
            raise WeirError(
                f"tova keeps the same tokens in all heads of a layer, but {own[0]} before it "
                "keeps different ones in each. Write tova(…, per_head=true), or put it directly "
                "after sink and recent."
            )

    @property
    def heads_agree(self) -> bool:
        """Whether all heads choose together."""
        return not self.per_head

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return the last query's attention, averaged [batch, kv_heads, slots]."""
        share = fold.observed.attention(slots, 1)[:, :, :, 0]
        if self.per_head:
            return share.mean(dim=2)
        return share.mean(dim=(1, 2), keepdim=True)[:, :, 0].expand_as(slots.a)
