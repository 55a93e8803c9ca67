"""Pools that rank tokens by a score: if there are too many tokens, those with the highest are
kept.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.kernels import ALIKE
from weir.pools.base import FINITE, Fold, SizedPool, find_outside, gather_kept, split
from weir.pools.failures import is_own
from weir.slab import Slots

Choose = Callable[[int, Slots, tuple[Tensor, ...]], Tensor]
"""Chooses the tokens that stay, given how many may stay, all slots, and their scores.

Returns [batch, kv_heads, slots], bool.
"""

TALLY = "tally"
"""The name of a tallied pool's numbers in `Fold.state`."""


class Ranked(SizedPool):
    """Keep the tokens with the highest scores, separately for each KV head.

    The first parameter of the pool is the number of tokens. Among equal scores, the older token is
    kept. Scores are equal if they differ only by rounding (`tie_margin`). Weights do not change.
    While there is room, nothing is scored, and all tokens are kept. A score that draws random
    numbers sets `is_stochastic = True`.

    Attributes:
        tie_margin: scores count as equal if they differ by at most this share; 0 for exact scores,
            such as places in the stream.
    """

    drops = True
    is_stochastic = False
    tie_margin: ClassVar[float] = ALIKE

    @abstractmethod
    def score(self, slots: Slots, fold: Fold) -> Tensor | tuple[Tensor, ...]:
        """Return how much each token matters, both for held tokens and for arrivals.

        Args:
            slots: held tokens and arrivals, the oldest first; the score of an empty slot is
                ignored.
            fold: all facts that a pool can use.

        Returns:
            [batch, kv_heads, slots]: `inf` for a token that is kept before all others, `-inf` for
                one that is evicted even if slots then stay free; or a tuple, in which the second
                score decides ties of the first.
        """

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Rank if there are too many tokens. The kept and the evicted tokens both have the oldest
        first.

        If scores never change and do not depend on other tokens, evicting all excess tokens at once
        gives the same result as evicting one after each arrival.
        """
        return self.fold_by(
            lambda n, slots, by: select_highest(n, slots.held, *by, alike=self.tie_margin),
            held,
            new,
            fold,
        )

    def fold_by(self, choose: Choose, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Fold with another rule that chooses by the scores, as `Chunks` does for whole spans."""
        both = fold.in_order(held, new)
        return split(both, self.stays(choose, both, fold), fold)

    def stays(self, choose: Choose, slots: Slots, fold: Fold) -> Tensor:
        """Choose the tokens that stay [batch, kv_heads, slots], bool. All stay while there is
        room.
        """
        if len(slots) <= self.slots():
            return slots.held
        score = self.score(slots, fold)
        scores = score if isinstance(score, tuple) else (score,)
        if not scores:
            raise WeirError(f"the score of the pool {self.name} cannot be used: there is none")
        for score in scores:
            _check_numbers(self.name, "score", score, slots)
        return choose(self.slots(), slots, scores)


class Tallied(Ranked):
    """A ranked pool that keeps a number for each token from fold to fold.

    `tally` computes the numbers again at every fold, even while there is room. When `score` is
    called, `fold.state["tally"]` has the number of each slot. By default, the numbers are the
    scores.
    """

    @abstractmethod
    def tally(self, slots: Slots, before: Tensor, fold: Fold) -> Tensor:
        """Return the new numbers [batch, kv_heads, slots], float32, finite for every token.

        Args:
            slots: all tokens, those held and those that arrive, the oldest first.
            before: the numbers so far; `first_tally` for arrivals.
            fold: all facts that a pool can use; `fold.state` is the pool's own.
        """

    def first_tally(self, new: Slots, fold: Fold) -> Tensor:
        """Return the numbers of arrivals before `tally` [batch, kv_heads, slots]: zeros."""
        return new.a.new_zeros(new.a.shape)

    def score(self, slots: Slots, fold: Fold) -> Tensor | tuple[Tensor, ...]:
        """Return the numbers as the score."""
        return fold.state[TALLY]

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make the numbers of the slots [batch, kv_heads, n], float32."""
        batch, heads = like.position.shape[:2]
        return {TALLY: like.a.new_zeros(batch, heads, self.slots())}

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """See `Pool.wrong_state`."""
        return find_outside(state, tally=FINITE)

    def fold_by(self, choose: Choose, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Fold as `Ranked.fold_by`. Each number goes with its token."""
        both = held.join(new)
        known = fold.state[TALLY][:, :, : len(held)]
        before = torch.cat([known, self.first_tally(new, fold)], dim=2)
        if not fold.unbroken:
            order = both.position.argsort(dim=2, stable=True)
            both, before = both.take_sorted(order), before.gather(2, order)
        tally = self.tally(both, before, fold)
        if not is_own(type(self)):  # tests check weir's own pools
            _check_numbers(self.name, TALLY, tally, both)
        tally = tally.masked_fill(~both.held, 0.0)
        fold.state[TALLY] = tally  # of all slots while `score` reads it, then of those that stay
        stays = self.stays(choose, both, fold)
        fold.state[TALLY] = gather_kept(tally, stays, self.slots())
        return split(both, stays)


class Asking(Ranked):
    """A ranked pool that reads the attention of some of the last queries.

    Attributes:
        asks: the name of the parameter with the number of queries.
    """

    asks: ClassVar[str] = "window"

    @property
    def needs_queries(self) -> int:
        """The number of queries, which is the value of the parameter `asks`."""
        return int(getattr(self, self.asks))

    def attention(self, slots: Slots, fold: Fold) -> Tensor:
        """Return shares of the queries' attention [batch, kv_heads, group, window, slots],
        float32.
        """
        return fold.observed.attention(slots, self.needs_queries)

    def logits(self, slots: Slots, fold: Fold) -> Tensor:
        """Return the logits of the queries in `attention` plus the log-weights b of the slots, in
        the shape of `attention`; -inf for a share of 0.
        """
        lse = fold.observed.lse[:, :, :, -self.needs_queries :, None]
        return self.attention(slots, fold).log() + lse.nan_to_num(neginf=0.0)


def _check_numbers(name: str, method: str, numbers: object, slots: Slots) -> None:
    """Refuse what a pool's `score` or `tally` returned if it is not a number for each slot."""
    if (problem := _find_wrong(numbers, slots, method)) is not None:
        raise WeirError(f"the {method} of the pool {name} cannot be used: {problem}")


def _find_wrong(score: object, slots: Slots, method: str) -> str | None:
    """Return why something that `method` returned is not a score of these slots. None if it is."""
    if score is None:
        return (
            f"it is None. Return a tensor from {method}(). If you return slots.mass or "
            "fold.read.gate, set needs_mass or needs_gates in the class"
        )
    if not isinstance(score, Tensor):
        return f"it must be a tensor, got a value of type {type(score).__name__}"
    if score.shape != slots.position.shape:
        return (
            f"its shape must be that of the slots, {list(slots.position.shape)}, got "
            f"{list(score.shape)}"
        )
    if not score.is_floating_point():
        return f"its dtype must be a floating-point dtype, got {score.dtype}"
    if bool((score.isnan() & slots.held).any()):
        return "it is NaN for some tokens"
    return None


def select_highest(n: int, among: Tensor, *scores: Tensor, alike: float = ALIKE) -> Tensor:
    """Select the `n` slots with the highest score [batch, kv_heads, slots], bool.

    Among equal scores, the first slots are selected.

    Args:
        n: the most slots; slots whose first score is `-inf` are left out even if there is room.
        among: the slots to select from [batch, kv_heads, slots], bool.
        scores: [batch, kv_heads, slots] each; the second decides where the first is equal.
        alike: scores count as equal to the lowest selected one if they differ from it by at most
            this share of it.
    """
    first = scores[0].masked_fill(~among, -torch.inf)
    count = first.shape[2]
    if not 0 < n < count:
        return ~first.isneginf() if n else torch.zeros_like(among)
    # Finding the lowest selected score takes a fraction of the time of sorting all of them. Slots
    # that are equal to it in one score are separated by the next.
    last = first.kthvalue(count - n + 1, dim=2, keepdim=True).values
    best, equal = _compare(first, last, alike)
    room = n - best.sum(dim=2, keepdim=True)
    for score in scores[1:]:
        most = int(room.max()) if room.device.type == "cpu" else n
        ranks = score.masked_fill(~equal, -torch.inf).topk(most, dim=2).values
        above, same = _compare(score, ranks.gather(2, room - 1), alike)
        best |= equal & above
        equal &= same
        room = n - best.sum(dim=2, keepdim=True)
    best |= equal & (equal.cumsum(dim=2) <= room)
    return best & ~first.isneginf()


def _compare(score: Tensor, last: Tensor, alike: float) -> tuple[Tensor, Tensor]:
    """Return whether a score is above the last that stays, and whether it is equal to it, bool."""
    # An infinite score is equal only to itself, because infinity times anything is not a margin.
    margin = (last.abs() * alike).masked_fill(last.isinf(), 0.0)
    above = score > last + margin
    return above, ~above & (score >= last - margin)


def pool_neighbors(votes: Tensor, position: Tensor, kernel: int, *, average: bool) -> Tensor:
    """Pool votes over the `kernel` places around each token [batch, kv_heads, slots], float64.

    With `average`, the result is their sum divided by `kernel`, otherwise the largest of them.
    Votes must not be negative; places without a token count as 0. Positions must be ascending along
    the slots, -1 where a slot is empty.
    """
    empty = position < 0
    if bool((empty[:, :, 1:] & ~empty[:, :, :-1]).any()):
        # Empty slots between tokens, as after tokens were dropped, would hide neighbors.
        order = position.argsort(dim=2, stable=True)
        found = pool_neighbors(
            votes.gather(2, order), position.gather(2, order), kernel, average=average
        )
        return torch.zeros_like(found).scatter(2, order, found)
    reach = kernel // 2
    # In double precision, the sum does not depend on its order, so ties remain ties.
    votes = votes.double()
    total = votes.clone()
    # No empty slot is between tokens, and places are distinct. So the slots of two tokens are at
    # most as far apart as their places.
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
