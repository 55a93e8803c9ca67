"""Lag-relative scores: tokens stay that stand out from the stretch of tokens after them.

LagKV (Liang, Zhang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens
Are Important", arXiv:2504.04704), section 3: the stream is cut into stretches of `lag` tokens; keys
and values of one are put in relation to the smallest and largest entries, by channel, of the next;
the spread over the channels, as a softmax over the stretch, is the score. No query is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, Pool
from weir.pools.parameters import Bounds
from weir.pools.ranked import TALLY, Tallied
from weir.pools.registry import pool
from weir.slab import Slots

SCORED = torch.finfo(torch.float32).tiny
"""No score is smaller; 0 says that a token has none yet."""


@pool("lagkv")
@dataclass(frozen=True)
class LagKV(Tallied):
    """Keep the tokens that differ most from the stretch behind theirs, each KV head its own.

    A token is scored once, when all tokens of the next stretch have come, from those of them that
    are still there, in the pool or in a `recent` in front; until then it stays. Scores of all
    stretches are compared with one another, because slots are for the whole stream; the paper keeps
    as many of each stretch. A channel in which the next stretch does not vary says nothing.

    Attributes:
        n: how many tokens are kept.
        lag: how many tokens a stretch has; 128 in the paper.
    """

    n: int
    lag: Annotated[int, Bounds(2)] = 64

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse a place in which tokens that wait take all slots."""
        waiting = 2 * self.lag - 1
        for place, earlier in enumerate(before):
            if earlier.keeps_run and all(pool.in_order for pool in before[:place]):
                waiting -= earlier.slots() or waiting
        if self.n <= waiting:
            raise WeirError(
                f"a token of lagkv waits for the {self.lag} behind its own stretch, and here up to "
                f"{waiting} wait at a time, which leaves none of {self.n} slots; take a smaller "
                f"lag, more than {waiting} slots, or put recent({2 * self.lag}) in front"
            )

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """The score of each token; `inf` while it has none [batch, kv_heads, slots], float32."""
        known = fold.state[TALLY]
        return known.masked_fill(known == 0, torch.inf)

    def tally(self, slots: Slots, before: Tensor, fold: Fold) -> Tensor:
        """The scores so far, and those of tokens whose next stretch is complete."""
        stretch = (slots.position - fold.origin) // self.lag
        complete = (stretch + 2) * self.lag <= fold.seen[:, None, None]
        due = slots.held & (before == 0) & complete
        if not bool(due.any()):
            return before
        first = int(stretch[due].min())
        near = [slots] if fold.read is None else [slots, _newer(fold.read.whole, slots)]
        place = torch.cat([each.position for each in near], dim=2)
        of = (place - fold.origin) // self.lag - first
        of = of.masked_fill(place < 0, -1).clamp_min(-1)
        keys = _spread(torch.cat([each.keys for each in near], dim=2).float(), of)
        values = _spread(torch.cat([each.values for each in near], dim=2).float(), of)
        score = (keys + values)[:, :, : len(slots)] / (2 * self.lag)
        return before.where(~due, score.float().clamp_min(SCORED))


def _newer(slots: Slots, than: Slots) -> Slots:
    """Those that are newer than all of some others: they stand in pools in front."""
    return slots.only(slots.position > than.position.amax(dim=2, keepdim=True))


def _spread(t: Tensor, stretch: Tensor) -> Tensor:
    """Compute how far each key or value stands out, over the average of its `stretch`, by number;
    -1 for none [batch, kv_heads, n].
    """
    dim = t.shape[3]
    count = int(stretch.max()) + 2
    # What is in no stretch goes to one behind the last, which nobody is compared with.
    of = torch.where(stretch < 0, count, stretch)
    each = of[..., None].expand_as(t)
    none = t.new_full((*t.shape[:2], count + 1, dim), torch.inf)
    low = none.scatter_reduce(2, each, t, "amin")
    high = (-none).scatter_reduce(2, each, t, "amax")
    after = (of + 1).clamp_max(count - 1)[..., None].expand_as(t)
    low, width = low.gather(2, after), (high - low).gather(2, after)
    relative = ((t - low) / width).masked_fill(~(width > 0), 0.0)
    spread = relative.std(dim=-1, correction=min(1, dim - 1)).double()
    # A softmax times how many there are: of a stretch some tokens may be gone.
    top = spread.new_full((*of.shape[:2], count + 1), -torch.inf)
    top = top.scatter_reduce(2, of, spread, "amax")
    power = (spread - top.gather(2, of)).exp()
    total = torch.zeros_like(top).scatter_add_(2, of, power)
    members = torch.zeros_like(top).scatter_add_(2, of, torch.ones_like(power))
    return power * (members / total).gather(2, of)
