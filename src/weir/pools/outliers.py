"""Keys that point away from their block stay: what BalanceKV keeps exactly for needles.

BalanceKV's needle variant (Kochetkova et al. 2025, section 4.2 and its released code): before
anything is balanced, tokens whose key has a mean inner product of zero or less with the keys of its
block are kept, and so are their neighbours. In the released code one layer chooses for all that
follow it; here each KV head of each layer chooses for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, Pool, pool
from weir.slab import EMPTY, Slots


@pool("outliers")
@dataclass(frozen=True)
class Outliers(Pool):
    """Keep tokens whose keys point away from those around them, and their neighbours.

    Where more qualify than there is room for, those stay that point away most, and of equal ones
    the older; a neighbour counts as much as what it stands beside.

    Attributes:
        n: how many slots.
        block: tokens that are compared with each other; no more than arrive at once, so behind a
            chunk of 1 nothing ever points away.
        dilate: so many neighbours on each side stay too; 25 in the authors' code.
    """

    n: int
    block: int = 256
    dilate: int = 25

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("block", 2), ("dilate", 0)):
            if getattr(self, name) < least:
                raise WeirError(f"{name} of outliers is {least} or more, not {getattr(self, name)}")

    def slots(self) -> int:
        """As many as it was given."""
        return self.n

    def state(self, like: Slots) -> dict[str, Tensor]:
        """`score`, how far each slot's token points away from its block: its mean inner product, or
        that of what it stands beside [batch, kv_heads, n], float32; inf where there is none.
        """
        shape = (*like.position.shape[:2], self.n)
        return {"score": torch.full(shape, torch.inf, device=like.position.device)}

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Compare arrivals with their block; who does not qualify or finds no room flows on."""
        if len(new) == 0:
            return held, new
        score = torch.cat([fold.state["score"][:, :, : len(held)], self._scores(new)], dim=2)
        both = held.join(new)
        best = score.argsort(dim=2, stable=True)[:, :, : self.n]
        stays = torch.zeros_like(both.held).scatter_(2, best, True) & score.isfinite() & both.held
        width = int(stays.sum(dim=2).max())
        order = (~stays).to(torch.uint8).argsort(dim=2, stable=True)[:, :, :width]
        there = stays.gather(2, order)
        score = score.gather(2, order).masked_fill(~there, torch.inf)
        fold.state["score"] = F.pad(score, (0, self.n - width), value=torch.inf)
        return both.take(order.where(there, EMPTY)), both.only(~stays)

    def _scores(self, new: Slots) -> Tensor:
        """The score of each arrival [batch, kv_heads, arrivals]; inf for those to pass on."""
        parts = []
        blocks = (t.split(self.block, dim=2) for t in (new.keys.float(), new.held))
        for keys, there in zip(*blocks, strict=True):
            keys = keys.masked_fill(~there[..., None], 0.0)
            mean = keys.sum(dim=2, keepdim=True) / there.sum(dim=2)[..., None, None].clamp_min(1)
            product = (keys * mean).sum(dim=3)
            parts.append(product.masked_fill(~there | (product > 0), torch.inf))
        score = torch.cat(parts, dim=2)
        reach = 2 * self.dilate + 1
        return -F.max_pool1d(-score, reach, stride=1, padding=self.dilate)
