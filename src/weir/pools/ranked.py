"""A pool whose rule is a score: where there are too many tokens, those of the highest score stay.

The base of `heavy` and `snap`, of the scores in `weir.pools.scores`, and of any pool that can say
of each token how much it matters: such a pool is its parameters and one method, `score`. Knows
nothing about what a score is made of.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, Pool, gather_kept, split
from weir.slab import Slots

Choose = Callable[[int, Slots, tuple[Tensor, ...]], Tensor]
"""(how many, of which tokens, by which scores) -> who stays [batch, kv_heads, slots], bool."""


class Ranked(Pool):
    """Keep the tokens of the highest score, as many as its first parameter says, by KV head.

    Where scores are equal, the older token stays. Weights stay as they came. Nothing is scored, and
    everything stays, as long as there is room.
    """

    def __post_init__(self) -> None:
        if self.slots() < 1:
            raise WeirError(f"{self.name} keeps at least 1 token, not {self.slots()}")

    @abstractmethod
    def score(self, slots: Slots, fold: Fold) -> Tensor | tuple[Tensor, ...]:
        """How much each token matters, of those held and those that arrive.

        Args:
            slots: all of them, from the oldest on; what an empty slot gets is not looked at.
            fold: what a pool may know.

        Returns:
            [batch, kv_heads, slots]: `inf` for a token that stays before all others, `-inf` for one
            that does not stay though there is room. Several such tensors where equal scores are not
            to be told apart by age at once: where the first is equal the second decides, and so on.
        """

    def _check_scores(self, scores: tuple[Tensor, ...], slots: Slots) -> None:
        """Refuse what no slots can be ranked by.

        Raises:
            WeirError: by the pool's name.
        """
        wrong = [_no_score(score, slots) for score in scores] or ["there is none"]
        for problem in wrong:
            if problem is not None:
                raise WeirError(f"the pool {self.name} cannot rank by its score: {problem}")

    def slots(self) -> int:
        """As many slots as tokens are kept: the first parameter."""
        return int(getattr(self, fields(cast(Any, self))[0].name))

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Rank where there are too many; what stays and what flows on lie from the oldest on.

        Scores do not change within a fold, so evicting all that is too many at once leaves what
        evicting one after each arrival would.
        """
        return self.fold_by(_best, held, new, fold)

    def fold_by(self, choose: Choose, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """A fold in which another rule chooses by the scores, as whole spans are (`Chunks`)."""
        both = fold.in_order(held, new)
        return split(both, self.stays(choose, both, fold), fold)

    def stays(self, choose: Choose, slots: Slots, fold: Fold) -> Tensor:
        """Who stays [batch, kv_heads, slots], bool; all while there is room."""
        if len(slots) <= self.slots():
            return slots.held
        score = self.score(slots, fold)
        scores = score if isinstance(score, tuple) else (score,)
        self._check_scores(scores, slots)
        return choose(self.slots(), slots, scores)


def _no_score(it: object, slots: Slots) -> str | None:
    """Why something is no score of these slots; None if it is one."""
    if not isinstance(it, Tensor):
        return f"it is no tensor but a {type(it).__name__}"
    if it.shape != slots.position.shape:
        return f"its shape is {list(it.shape)}, and the slots are {list(slots.position.shape)}"
    if not it.is_floating_point():
        return f"it is of {it.dtype}, and has to be of floating point"
    if bool((it.isnan() & slots.held).any()):
        return "it is not a number for some tokens"
    return None


def _best(n: int, slots: Slots, scores: tuple[Tensor, ...]) -> Tensor:
    """The `n` tokens of the highest scores, as `Choose`."""
    return select_highest(n, slots.held, *scores)


def select_highest(n: int, among: Tensor, *scores: Tensor) -> Tensor:
    """The `n` slots of the highest score [batch, kv_heads, slots], bool; of equal ones the first.

    Args:
        n: how many, at most; those of a first score of `-inf` are left out though there be room.
        among: the slots it is about [batch, kv_heads, slots], bool.
        scores: the first decides, where it is equal the second, and so on
            [batch, kv_heads, slots] each.
    """
    first = scores[0].masked_fill(~among, -torch.inf)
    count = first.shape[2]
    if not 0 < n < count:
        return ~first.isneginf() if n else torch.zeros_like(among)
    # To find who is the last to stay takes a fraction of what sorting all does. Whoever is as good
    # by one score is told apart by the next.
    last = first.kthvalue(count - n + 1, dim=2, keepdim=True).values
    best, equal = first > last, first == last
    room = n - best.sum(dim=2, keepdim=True)
    for score in scores[1:]:
        most = int(room.max()) if room.device.type == "cpu" else n
        ranks = score.masked_fill(~equal, -torch.inf).topk(most, dim=2).values
        last = ranks.gather(2, room - 1)
        best |= equal & (score > last)
        equal &= score == last
        room = n - best.sum(dim=2, keepdim=True)
    best |= equal & (equal.cumsum(dim=2) <= room)
    return best & ~first.isneginf()


def pool_neighbors(votes: Tensor, position: Tensor, kernel: int, *, average: bool) -> Tensor:
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
    # Places are distinct, so neighbors in the stream are at most as far apart in slots.
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


TALLY = "tally"
"""What the numbers are called in `Fold.state`."""


class Tallied(Ranked):
    """Keep the tokens of the highest score, and a number of each beside them.

    At every fold, also while there is room, `tally` says the numbers anew. While `score` is asked,
    `fold.state[TALLY]` has the number of each slot it is asked about.
    """

    @abstractmethod
    def tally(self, slots: Slots, before: Tensor, fold: Fold) -> Tensor:
        """The numbers from now on [batch, kv_heads, slots], float32; finite where a token is.

        Args:
            slots: all tokens, those held and those that arrive, from the oldest on.
            before: the numbers so far, of the same shape; 0 for what arrives.
            fold: what a pool may know; `fold.state` is the pool's own.
        """

    def score(self, slots: Slots, fold: Fold) -> Tensor | tuple[Tensor, ...]:
        """The numbers themselves."""
        return fold.state[TALLY]

    def state(self, like: Slots) -> dict[str, Tensor]:
        """The number of each slot's token [batch, kv_heads, n], float32."""
        batch, heads = like.position.shape[:2]
        return {TALLY: like.a.new_zeros(batch, heads, self.slots())}

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """Why tensors cannot be its state; see `Pool.wrong_state`."""
        wrong = [name for name, t in state.items() if not bool(t.isfinite().all())]
        return f"{wrong[0]} is not finite" if wrong else None

    def fold_by(self, choose: Choose, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """As `Ranked.fold_by`; the numbers go with the tokens."""
        both = held.join(new)
        before = fold.state[TALLY][:, :, : len(held)]
        before = torch.cat([before, new.a.new_zeros(new.a.shape)], dim=2)
        if not fold.unbroken:
            order = both.position.argsort(dim=2, stable=True)
            both, before = both.take_sorted(order), before.gather(2, order)
        tally = self.tally(both, before, fold).masked_fill(~both.held, 0.0)
        told = replace(fold, state={**fold.state, TALLY: tally})
        stays = self.stays(choose, both, told)
        kept, gone = split(both, stays)
        fold.state[TALLY] = gather_kept(tally, stays, self.slots())
        return kept, gone
