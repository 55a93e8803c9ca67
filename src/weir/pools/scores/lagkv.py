"""Lag-relative scores: keep tokens that differ from the segment of tokens after them.

LagKV (Liang, Zhang et al. 2025, "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens
Are Important", arXiv:2504.04704), section 3: the stream is cut into segments of `lag` tokens. Keys
and values of a segment are scaled, in each channel, by the smallest and largest entry of the next
segment. The score is the standard deviation of a token's scaled entries, as a softmax over the
segment. No query is used.
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
"""The smallest score; 0 means that a token has no score yet."""


@pool("lagkv")
@dataclass(frozen=True)
class LagKV(Tallied):
    """Keep the tokens that differ most from the segment after theirs, separately for each KV head.

    A token is scored once, when all tokens of the next segment have arrived. Its score is computed
    from the tokens of that segment that are still in the pool or in a `recent` before it. Until a
    token has a score, it is kept. Scores of all segments are compared, because the slots are for
    the whole stream; the paper keeps the same number of tokens of each segment. In a channel in
    which the next segment does not vary, scaled entries are 0.

    Attributes:
        n: number of tokens to keep.
        lag: number of tokens in a segment; 128 in the paper.
    """

    n: int
    lag: Annotated[int, Bounds(2)] = 64

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse a place in the pipe where waiting tokens would take all slots."""
        waiting = 2 * self.lag - 1
        for place, earlier in enumerate(before):
            if earlier.keeps_run and all(pool.in_order for pool in before[:place]):
                waiting -= earlier.slots() or waiting
        if self.n <= waiting:
            raise WeirError(
                f"lagkv has {self.n} slots, but up to {waiting} tokens at a time wait for the "
                f"{self.lag} tokens after their segment. Use a smaller lag, more than {waiting} "
                f"slots, or put recent({2 * self.lag}) before it."
            )

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        """Return the score of each token; `inf` while it has none [batch, kv_heads, slots],
        float32.
        """
        known = fold.state[TALLY]
        return known.masked_fill(known == 0, torch.inf)

    def tally(self, slots: Slots, before: Tensor, fold: Fold) -> Tensor:
        """Return the scores so far, and those of tokens whose next segment is complete."""
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
    """Return the slots that are newer than every token in `than`. They are in pools before this
    one.
    """
    return slots.only(slots.position > than.position.amax(dim=2, keepdim=True))


def _spread(t: Tensor, stretch: Tensor) -> Tensor:
    """Compute how far each key or value stands out, divided by the average of its segment [batch,
    kv_heads, n].

    `stretch` has the number of each token's segment, -1 for none.
    """
    dim = t.shape[3]
    count = int(stretch.max()) + 2
    # Tokens in no segment go to an extra one after the last, which nothing is compared with.
    of = torch.where(stretch < 0, count, stretch)
    each = of[..., None].expand_as(t)
    none = t.new_full((*t.shape[:2], count + 1, dim), torch.inf)
    low = none.scatter_reduce(2, each, t, "amin")
    high = (-none).scatter_reduce(2, each, t, "amax")
    after = (of + 1).clamp_max(count - 1)[..., None].expand_as(t)
    low, width = low.gather(2, after), (high - low).gather(2, after)
    relative = ((t - low) / width).masked_fill(~(width > 0), 0.0)
    spread = relative.std(dim=-1, correction=min(1, dim - 1)).double()
    # A softmax times the number of tokens, because some tokens of a segment may be gone.
    top = spread.new_full((*of.shape[:2], count + 1), -torch.inf)
    top = top.scatter_reduce(2, of, spread, "amax")
    power = (spread - top.gather(2, of)).exp()
    total = torch.zeros_like(top).scatter_add_(2, of, power)
    members = torch.zeros_like(top).scatter_add_(2, of, torch.ones_like(power))
    return power * (members / total).gather(2, of)
