"""A weighted sample of the tokens that reach the pool, with an estimate of the sample's error.

Priority sampling (Duffield, Lund and Thorup 2007, "Priority sampling for estimation of arbitrary
subset sums", section 1): a token of weight s draws u and has the priority s / u. The n tokens with
the highest priorities are kept. With τ the highest priority among the others, each kept token
counts max(1, τ / s) times. Sums over the kept tokens are then unbiased estimates of the sums over
all tokens that came, whatever the weights.

"Error certificates" (arXiv:2607.21475) draws such a sample once from a whole prompt, in addition
to tokens that are kept for certain. Here, weights and random numbers of tokens never change, and τ
only rises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weir.pools.base import (
    FROM_0,
    LOG_WEIGHT,
    MOST_WEIGHT,
    Fold,
    SizedPool,
    find_outside,
    gather_kept,
)
from weir.pools.parameters import Natural, Share
from weir.pools.ranked import select_highest
from weir.pools.registry import pool
from weir.pools.sample import Sample
from weir.slab import Slots


@pool("tail")
@dataclass(frozen=True)
class Tail(SizedPool, Sample):
    """Keep a sample of all arriving tokens, with probabilities by contribution, weighted to be
    unbiased.

    The contribution of a token is the attention it received before it came here, times the length
    of its value. If the output projection is known, this length is |W_o v|, as a mean over the
    query heads of the group. The weight of a token is its contribution, but at least `floor` times
    the mean contribution of all tokens that came so far. No token overflows.

    Attributes:
        n: number of tokens to keep.
        attention: whether received attention is in the weight.
        value: whether the length of the value is in the weight. With neither, all tokens have the
            same probability.
        floor: from 0 to 1; above 0, no token counts for more than about 1 / floor times its count
            in a uniform sample.
        watch: how many of the last queries of each fold are used to estimate the error (`report`);
            0 for none.
    """

    weighted = True
    per_head = True

    n: int
    attention: bool = True
    value: bool = True
    floor: Share = 0.1
    watch: Natural = 8

    @property
    def needs_mass(self) -> bool:
        """Whether attention is in the weight."""
        return self.attention

    @property
    def needs_queries(self) -> int:
        """The number of watched queries."""
        return self.watch

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make the state of a sample, and further tensors.

        They are `said`, the logarithm of each slot's weight s [batch, kv_heads, n]; `threshold`,
        the logarithm of τ, and `sum`, the sum of all contributions [batch, kv_heads], all float64.
        If queries are watched, the state also has, all [batch, kv_heads]: `watched`, the number of
        watched queries so far, int64; `variance`, the sum of their relative variances, float64; and
        `until`, the number of tokens seen at the last fold, int64.
        """
        state = super().state(like)
        none = torch.zeros_like(state["came"], dtype=torch.float64)
        state["said"] = none[..., None].repeat(1, 1, self.n)
        state["threshold"], state["sum"] = none - torch.inf, none
        if self.watch:
            state["watched"], state["variance"] = torch.zeros_like(state["came"]), none.clone()
            state["until"] = torch.zeros_like(state["came"])
        return state

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """See `Pool.wrong_state`."""
        sums = dict.fromkeys(("sum", "variance", "watched", "until"), FROM_0)
        said = (-MOST_WEIGHT, MOST_WEIGHT)
        wrong = find_outside(state, said=said, threshold=LOG_WEIGHT, **sums)
        return wrong or super().wrong_state(state, held, ahead)

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Keep the tokens with the highest priorities. τ rises to the highest priority of the
        others, if that is larger.
        """
        state = fold.state
        old = self.came_with(held, fold)
        if self.watch:
            if len(held) and fold.read is not None:
                self._watch(held, old, fold)
            state["until"] = fold.seen[:, None].expand_as(state["until"]).clone()
        if not len(new):
            return held, new
        both = old.join(new)
        said = torch.cat([state["said"][:, :, : len(held)], self._said(new, fold)], dim=2)
        priority = (said - self.draw(both, fold).log()).masked_fill(~both.held, -torch.inf)
        stays = select_highest(self.n, both.held, priority, alike=0.0)
        best_gone = priority.masked_fill(stays, -torch.inf).amax(dim=2)
        state["threshold"] = state["threshold"].maximum(best_gone)
        kept = both.only(stays)
        state["said"] = gather_kept(said, stays, self.n)
        factor = state["threshold"][..., None] - state["said"][:, :, : len(kept)]
        factor = factor.clamp_min(0.0)
        return self.weigh(kept, factor, fold), new.part(0, 0)

    def report(self, state: dict[str, Tensor], row: int) -> dict[str, Any]:
        """Return `mean_error`, the relative standard error of the layer's outputs due to the
        sample.

        It is the root mean square over the row's heads and all queries watched since the stream
        began, so the newest queries may have a larger error. None before the first watched query.
        With `watch=0`, the report is empty.
        """
        if not self.watch:
            return {}
        watched = int(state["watched"][row].sum())
        mean = float(state["variance"][row].sum()) / watched if watched else None
        return {"mean_error": None if mean is None else mean**0.5}

    def _said(self, new: Slots, fold: Fold) -> Tensor:
        """Compute the logarithm of each arrival's weight [batch, kv_heads, slots], float64."""
        said = new.a.new_ones(new.a.shape, dtype=torch.float64)
        if self.attention:
            assert new.mass is not None
            said = new.mass.double()
        if self.value and fold.read is None:
            said = said * new.values.float().norm(dim=3)
        elif self.value and fold.read is not None:
            said = said * fold.read.lengths(new.values).mean(dim=2)
        said = said.masked_fill(~new.held, 0.0)
        total = fold.state["sum"][..., None] + said.cumsum(dim=2)
        nth = fold.state["came"][..., None] + new.held.cumsum(dim=2)
        fold.state["came"] = fold.state["came"] + new.held.sum(dim=2)
        fold.state["sum"] = total[..., -1]
        said = said.maximum(self.floor * total / nth.clamp_min(1))
        return said.clamp_min(torch.finfo(torch.float32).tiny).log()

    def _watch(self, held: Slots, came: Slots, fold: Fold) -> None:
        """Add up the relative variances of the last queries' outputs over the sample as read.

        Each token was in the sample with a probability π, the inverse of the number of times that
        it counts. Without the token, the output z would move by p / (1 - p) (z - v), with v its
        value and p the share of attention that the token and those it represents received. So the
        variance of z is Σ (1 - π) (p / (1 - p))² |v - z|², and the relative variance is this
        divided by |z|². This is the jackknife estimate (Särndal, Swensson and Wretman 1992,
        sections 5.6 and 11.5). It assumes that draws are independent, as they nearly are.
        """
        read = fold.observed
        share = read.attention(held, self.watch).double()
        answer = read.answers[:, :, :, -self.watch :].double()
        chance = (came.b - held.b).double().masked_fill(~held.held, 0.0).exp()
        lift = (held.a - held.b).double().masked_fill(~held.held, 0.0).exp()
        value = held.values.double() * lift[..., None]
        # Distances from differences, so that a sample of equal values has no error.
        exact = "donot_use_mm_for_euclid_dist"
        off = torch.cdist(answer.flatten(2, 3), value, compute_mode=exact).square().view_as(share)
        # If a token has all of the attention, there is no other token to compare it with, so the
        # ratio is limited.
        ratio = share / (1 - share).clamp_min(torch.finfo(torch.float32).eps)
        variance = ((1 - chance)[:, :, None, None] * ratio.square() * off).sum(dim=-1)
        length = answer.square().sum(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        error = variance / length
        # Queries from before the last fold were counted at that fold, over the sample that they
        # read.
        back = torch.arange(error.shape[3], 0, -1, device=error.device)
        new = back <= (fold.seen[:, None] - fold.state["until"])[..., None]
        new = new[:, :, None].expand_as(error)
        fold.state["variance"] = fold.state["variance"] + (error * new).sum(dim=(2, 3))
        fold.state["watched"] = fold.state["watched"] + new.sum(dim=(2, 3))
