"""Snapshots: the last queries vote on who stays.

SnapKV (Li et al. 2024, "SnapKV: LLM Knows What You Are Looking for Before Generation",
arXiv:2404.14469), section 4 and Listing 1: at the end of the prompt the attention of the last
queries, the *observation window*, is summed for each token before the window. Votes are pooled
over neighbouring positions, so that a token that is wanted brings its surroundings along; the
tokens with the highest pooled votes stay, and so does the window. In a stream, this happens at
every fold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, Pool, pool
from weir.slab import Form, Slots, attention_mass


@pool("snap")
@dataclass(frozen=True)
class Snap(Pool):
    """Keep the newest tokens, and of the others those the last queries attend to, by KV head.

    A vote is the softmax of a query over all tokens that are in the pool or arrive at it and are
    not newer than the query, at their places in the stream. It is summed over the last `window`
    queries and over the query heads of the KV head's group. Tokens of the window cannot be voted
    for, they stay; where a pool in front of this one holds them, all slots are for the others.
    Where pooled votes are equal, a token's own votes decide, and then its age: the older stays.
    A token that stands for several receives the votes of all of them; weights travel along.

    Attributes:
        budget: how many tokens are kept, those of the window that come here among them.
        window: how many of the last queries vote.
        kernel: over how many neighbouring places of the stream votes are pooled, the token's own
            in the middle: an odd number; 1 for none.
        average: a token gets the average of its neighbours' votes, tokens that are gone counted as
            none; otherwise their largest.
    """

    budget: int
    window: int = 32
    kernel: int = 7
    average: bool = False

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise WeirError(f"snap keeps at least 1 token, not {self.budget}")
        if self.window < 1:
            raise WeirError(f"at least the last query votes in snap, not the last {self.window}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise WeirError(
                f"the kernel of snap has a token in its middle, so it is odd and at least 1, not "
                f"{self.kernel}; the paper's are 5 and 7"
            )

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse a window that leaves no slot to vote about.

        Raises:
            WeirError: the budget is not larger than the window, or than what of it comes here.
        """
        inside = self._inside(before)
        if self.budget <= inside:
            raise WeirError(
                f"snap keeps the newest {inside} tokens that come to it, so a budget of "
                f"{self.budget} leaves nothing to vote about; take a budget of {inside + 1} or "
                f"more, a smaller window, or put recent({self.window}) in front"
            )

    @property
    def needs_queries(self) -> int:
        """The window's."""
        return self.window

    def slots(self) -> int:
        """The budget, the window in it."""
        return self.budget

    def fixed(self, before: tuple[Pool, ...]) -> int:
        """Those of the window that comes here: each layer keeps it whole."""
        return self._inside(before)

    def _inside(self, before: tuple[Pool, ...]) -> int:
        """How many tokens of the window come here, and are not held by a pool in front."""
        inside = self.window
        for place, earlier in enumerate(before):
            if earlier.keeps_run and all(pool.in_order for pool in before[:place]):
                newest = earlier.slots()
                inside -= self.window if newest is None else newest
        return max(0, inside)

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Let the window vote where there are too many; what flows on lies in order, too."""
        both = held.join(new)
        if not fold.unbroken:
            both = both.by_position()
        if len(both) <= self.budget:
            return both, both.part(0, 0)
        position, ahead = both.position, (fold.seen + fold.origin)[:, None, None]
        in_window = position >= ahead - self.window
        votes = self._votes(both, fold).masked_fill(in_window | ~both.held, 0.0)
        score = pooled(votes, position, self.kernel, average=self.average)
        score = score.masked_fill(in_window, torch.inf).masked_fill(~both.held, -torch.inf)
        # Both sorts are stable: by pooled votes, then by a token's own, then by age.
        order = votes.argsort(dim=2, descending=True, stable=True)
        by_score = score.gather(2, order).argsort(dim=2, descending=True, stable=True)
        best = order.gather(2, by_score[:, :, : self.budget])
        stays = torch.zeros_like(both.held).scatter_(2, best, True)
        return both.only(stays), both.only(~stays)

    def _votes(self, slots: Slots, fold: Fold) -> Tensor:
        """The attention of the window's queries to each slot [batch, kv_heads, slots].

        There is a token too many, so at least as many queries were seen as the window has.
        """
        assert fold.queries is not None
        queries = fold.queries[:, :, :, -self.window :]
        ahead = (fold.seen + fold.origin)[:, None, None, None, None]
        back = torch.arange(queries.shape[3], 0, -1, device=queries.device)
        place = ahead - back[:, None]
        position = slots.position[:, :, None, None]
        sees = (position >= 0) & (position <= place)
        bias = torch.zeros(sees.shape, device=sees.device).masked_fill_(~sees, -torch.inf)
        if fold.alibi is not None:
            far = torch.iinfo(position.dtype).max
            held = slots.position
            first = held.masked_fill(held < 0, far).amin(dim=2, keepdim=True)
            heads = held.shape[1]
            bias = bias + fold.alibi.bias(held, heads, first, ahead[:, :, :, 0, 0] - 1)
        return attention_mass(queries, slots.keys, slots.b, fold.form or Form(fold.scale), bias)


def pooled(votes: Tensor, position: Tensor, kernel: int, *, average: bool) -> Tensor:
    """Votes pooled over the `kernel` places of the stream around each token.

    Args:
        votes: not negative, 0 for none [batch, kv_heads, slots].
        position: places in the stream, rising along the slots; -1 where empty.
        kernel: an odd number.
        average: the sum divided by the kernel; otherwise the largest.

    Returns:
        [batch, kv_heads, slots], float64.
    """
    reach = kernel // 2
    # In double precision the sum does not depend on its order, so that ties remain ties.
    votes = votes.double()
    total = votes.clone()
    # Places are distinct, so neighbours in the stream are at most as far apart in slots.
    for step in range(1, min(reach, votes.shape[2] - 1) + 1):
        near = position[:, :, step:] - position[:, :, :-step] <= reach
        older, newer = votes[:, :, :-step] * near, votes[:, :, step:] * near
        if average:
            total[:, :, step:] += older
            total[:, :, :-step] += newer
        else:
            total[:, :, step:] = total[:, :, step:].maximum(older)
            total[:, :, :-step] = total[:, :, :-step].maximum(newer)
    return total / kernel if average else total
