"""Merge evicted tokens into a few weighted means of keys and values.

ResKV (arXiv:2607.29591): in addition to the tokens that are kept exactly, some slots represent the
other tokens, in groups. The slot of a group has the mean of the group's keys, the mean of its
values, and the logarithm of its size as a log-weight. The exponential of a mean logit is less than
the mean of the exponentials. A correction of the log-weight makes up for the second-order term of
this difference, which depends on the spread of the keys. In every layer, the latest queries decide
how much weight the means get. In a stream, merged tokens fade: they count less as more tokens
arrive.

Groups are joined by the rule of Ward (1963, "Hierarchical Grouping to Optimize an Objective
Function"): joining two groups of weights v and w, whose means are a distance d apart, adds v w / (v
+ w) d^2 to the sum of squares around means, and the groups that add the least are joined first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weir.pools.base import FROM_0, LOG_WEIGHT, Fold, SizedPool, find_outside, gather_kept
from weir.pools.observed_attention import ObservedAttention
from weir.pools.parameters import Count
from weir.pools.registry import pool
from weir.slab import Slots

MOST_CORRECTION = 5.0
"""The most by which the correction for the spread of keys raises a log-weight. For wider groups,
a second-order correction is meaningless.
"""
ALIKE = 1e-3
"""Gates (see `GATES`) whose error exceeds the smallest by at most this share are equally good."""
LASTS = 0.9
"""The factor by which the earlier errors of all gates are multiplied at each fold."""


@pool("residue")
@dataclass(frozen=True)
class Residue(SizedPool):
    """Keep all tokens that arrive, merged into `r` means, separately for each KV head.

    Keys are merged without rotation, as if all tokens of a group were at the place of its newest
    token, which is the place of the slot. Tokens that the last queries distinguish the least are
    merged. Nothing is merged while there is room, and no token overflows.

    Attributes:
        r: number of means.
        half_life: number of further arrivals after which a token in the pool counts half as much;
            only arrivals that lead to merging count. `none` if tokens never count less.
        spread: whether the weights of means make up for the spread of the keys in them.
        gate: whether the weights of all means of a layer are multiplied by a *gate* from 0 to 1,
            the one that would have changed the outputs of the last queries least.
        window: how many of the last queries are used.
    """

    ends_pipe = True  # its slots represent all tokens that came
    is_stochastic = False
    synthetic = True

    r: int
    half_life: Count | None = 256
    spread: bool = True
    gate: bool = True
    window: Count = 64

    @property
    def needs_queries(self) -> int:
        """The number of queries in the window."""
        return self.window

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make the state, all float32.

        For each slot it has the log-weights `a` and `b` of its group, without correction and gate
        [batch, kv_heads, r], and the variance of the group's keys in each dimension, `spread`
        [batch, kv_heads, r, key_dim]. For each gate, `misled` is how far it has moved the outputs
        of recent queries from the exact ones [batch, kv_heads, gates].
        """
        batch, heads, _, key_dim = like.keys.shape
        weights, spread = (batch, heads, self.r), (batch, heads, self.r, key_dim)
        state = {name: like.a.new_full(weights, -torch.inf) for name in ("a", "b")}
        misled = like.a.new_zeros(batch, heads, len(GATES))
        return {**state, "spread": like.a.new_zeros(spread), "misled": misled}

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """See `Pool.wrong_state`."""
        return find_outside(state, a=LOG_WEIGHT, b=LOG_WEIGHT, spread=FROM_0, misled=FROM_0)

    def report(self, state: dict[str, Tensor], row: int) -> dict[str, Any]:
        """Return `gate`, the share of their weight that the means of the layer get. Empty if the
        parameter `gate` is false.
        """
        return {"gate": float(_best(state["misled"])[row])} if self.gate else {}

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Merge until at most `r` slots are left, and weigh them for the tokens that they
        represent.
        """
        gone = new.part(0, 0)
        if not bool(new.held.any()):
            return held, gone
        both, full = held.join(new), len(held) + len(new) > self.r
        faded: float | Tensor = 0.0
        if full and self.half_life is not None:
            faded = new.held.sum(dim=2, keepdim=True) * (math.log(2) / self.half_life)
        a, b = (
            torch.cat([fold.state[name][:, :, : len(held)] - faded, getattr(new, name)], dim=2)
            for name in ("a", "b")
        )
        both = replace(both, a=a, b=b)
        if not full:
            self._remember(fold, both)
            return held.join(new), gone
        keys = fold.observed.unrotated(both).float()
        power = (fold.observed.power(self.window) * fold.form.scale**2)[:, :, None]
        # With this scale, the distance between two keys estimates how much the last queries'
        # logits for them differ.
        top = b.amax(dim=2, keepdim=True)
        weight = (b - top.masked_fill(top.isneginf(), 0.0)).double().exp()
        near = merge_nearest(keys * power.sqrt(), weight, both.held, self.r)
        groups = Groups.of(near, both)
        mean = groups.mean(keys, b)
        kept = self._merged(both, groups, mean, fold.observed)
        self._remember(fold, kept)
        home = mean.gather(2, groups.home[..., None].expand_as(mean))
        spread = fold.state["spread"][:, :, : len(held)]
        spread = F.pad(spread, (0, 0, 0, len(new))) + (keys - home).square()
        spread = gather_kept(groups.mean(spread, b), groups.stays, self.r)
        fold.state["spread"] = spread
        more = torch.zeros_like(kept.b)
        if self.spread:
            more = ((power * spread[:, :, : len(kept)]).sum(dim=3) / 2).clamp_max(MOST_CORRECTION)
        if self.gate:
            came = torch.arange(len(both), device=b.device) >= len(held)
            parts = (groups.total(t.where(came, -torch.inf)) for t in (a, b))
            above, below = (gather_kept(t, groups.stays, len(kept)) + more for t in parts)
            now = measure_misled(
                fold.observed, held, new, replace(kept, a=above, b=below), self.window
            )
            fold.state["misled"] = LASTS * fold.state["misled"] + now
            more = more + _best(fold.state["misled"]).log()[:, None, None]
        return replace(kept, a=kept.a + more, b=kept.b + more), gone

    def _merged(self, both: Slots, groups: Groups, mean: Tensor, read: ObservedAttention) -> Slots:
        """Return the slots that stay, weighted for their groups. A single token stays unchanged."""
        several = (groups.member.sum(dim=2) > 1)[..., None]
        said = read.rotate_to(mean, both.position).to(both.keys.dtype)
        values = groups.mean(both.values, both.a).to(both.values.dtype)
        return replace(
            both,
            keys=torch.where(several, said, both.keys),
            values=torch.where(several, values, both.values),
            a=groups.total(both.a),
            b=groups.total(both.b),
        ).only(groups.stays)

    def _remember(self, fold: Fold, slots: Slots) -> None:
        """Save the weights of groups before correction and gate."""
        for name in ("a", "b"):
            log = getattr(slots, name)
            fold.state[name] = F.pad(log, (0, self.r - len(slots)), value=-torch.inf)


def _best(misled_by: Tensor) -> Tensor:
    """Return the gate with the smallest error over the queries of all heads [batch], float32."""
    far = misled_by.sum(dim=1)
    # If only means were read, all gates but 0 give the same result, and rounding must not choose.
    good = far <= far.amin(dim=1, keepdim=True) * (1 + ALIKE)
    return misled_by.new_tensor(GATES)[good.to(torch.uint8).argmax(dim=1)]


GATES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Shares of its weight that a mean may get. Among equally good ones, the first is used."""
LEAST = 1e-6
"""The smallest share of attention that is used as a divisor. A query with less has attended to
almost nothing but the tokens that `measure_misled` leaves out, so its answer does not matter.
"""
ROUNDING = 1e-5
"""How much rounding may change an answer, as a share of it, and how much it may change a share of
attention that is computed as 1 minus other shares.
"""


def measure_misled(
    read: ObservedAttention, held: Slots, new: Slots, means: Slots, window: int
) -> Tensor:
    """Measure how far the last `window` queries' outputs move if means replace the arrivals.

    The tokens in `held` are left out of both outputs, because their exact attention is no longer
    known. `means` are weighted only for the arrivals. Returns, for each gate, the squared distance
    between the layer's outputs with the arrivals and with the means, summed over the queries and
    the query heads of each KV head [batch, kv_heads, gates].
    """
    old_above, old_below = _part(read.attention(held, window), held)
    above, below = _part(read.attention(new, window), new)
    rest_below = 1 - old_below - below
    # For a query that attended only to held tokens and arrivals, this difference is only rounding.
    # It is set to zero, because otherwise it would decide between gates that are equally good.
    alone = rest_below <= ROUNDING
    rest_above = read.answers[:, :, :, -window:].float() - old_above - above
    rest_above, rest_below = (t.masked_fill(alone, 0.0) for t in (rest_above, rest_below))
    truth = (rest_above + above) / (rest_below + below).clamp_min(LEAST)
    above, below = _part(read.would_attend(means)[:, :, :, -window:], means)

    def moves(answers: Tensor) -> Tensor:
        if read.output is not None:
            answers = torch.einsum("bhgnd,hged->bhgne", answers, read.output)
        return answers.square().sum(dim=(2, 3, 4))

    far = []
    for gate in GATES:
        answer = (rest_above + gate * above) / (rest_below + gate * below).clamp_min(LEAST)
        far.append(moves(answer - truth))
    return torch.stack(far, dim=2).maximum(moves(ROUNDING * truth)[..., None])


def _part(shares: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
    """Compute what slots add to attention's numerator and denominator, divided by the latter."""
    more = (slots.a - slots.b).exp().masked_fill(~slots.held | slots.b.isneginf(), 0.0)
    above = shares * more[:, :, None, None]
    return above @ slots.values.float()[:, :, None], shares.sum(dim=4, keepdim=True)


LEAST_WEIGHT = 1e-300
"""Smaller weights count as zero."""
SAME_POINT = 1e-12
"""Points are equal if their squared distance is at most this share of the sum of their squared
lengths: such a distance can come from rounding.
"""


def merge_nearest(points: Tensor, weight: Tensor, among: Tensor, most: int) -> Tensor:
    """Join points until at most `most` groups are left.

    Returns, for each point, the first point of its group [batch, heads, n], int64. In each round,
    two groups are joined if each is the cheapest for the other to join, by Ward's rule. Pairs with
    the lowest cost are joined first and, among equal costs, those with the earlier points. Points
    [batch, heads, n, dim] are finite, their `weight` is float64, and `among` says which of them
    exist.
    """
    n = among.shape[2]
    step = torch.arange(n, device=points.device)
    group = step.expand(among.shape)
    first = among
    mean = points.double()
    while True:
        excess = first.sum(dim=2, keepdim=True) - most
        if not bool((excess > 0).any()):
            return group
        cost = _costs(mean, weight).masked_fill(~(first[..., None] & first[:, :, None]), torch.inf)
        cost = cost.masked_fill(step[:, None] == step, torch.inf)
        least, nearest = cost.min(dim=3)
        mutual = (nearest.gather(2, nearest) == step) & (step < nearest) & first
        rank = least.masked_fill(~mutual, torch.inf).argsort(dim=2, stable=True).argsort(dim=2)
        takes = mutual & (rank < excess)
        theirs = weight.gather(2, nearest)
        share = theirs / (weight + theirs).clamp_min(LEAST_WEIGHT)
        other = mean.gather(2, nearest[..., None].expand_as(mean))
        mean = torch.where(takes[..., None], torch.lerp(mean, other, share[..., None]), mean)
        weight = torch.where(takes, weight + theirs, weight)
        # The group that each group joins: itself, unless another group takes it in. Groups that
        # take in no other write to place n, which is cut off.
        goes = F.pad(step.expand(among.shape), (0, 1))
        goes = goes.scatter(2, nearest.where(takes, n), step.expand(among.shape))[:, :, :n]
        first = first & (goes == step)
        group = goes.gather(2, group)


def _costs(mean: Tensor, weight: Tensor) -> Tensor:
    """Compute the cost of joining two groups [batch, heads, n, n], finite and exactly symmetric.

    Otherwise three equally near groups could each be nearest to the next, so that no two of them
    would ever be joined.
    """
    square = mean.square().sum(dim=3)
    squares = square[..., None] + square[:, :, None]
    product = mean @ mean.transpose(2, 3)
    far = squares - (product + product.transpose(2, 3))
    far = far.masked_fill(far <= SAME_POINT * squares, 0.0)
    both = weight[..., None] + weight[:, :, None]
    return far * (weight[..., None] * weight[:, :, None] / both.clamp_min(LEAST_WEIGHT))


@dataclass(frozen=True)
class Groups:
    """The groups of slots.

    Attributes:
        home: for each slot, the slot of its group's newest member [batch, kv_heads, n], int64.
        stays: which slots are such homes [batch, kv_heads, n], bool.
        member: whether slot i is in the group whose home is slot j [batch, kv_heads, i, j], bool.
    """

    home: Tensor
    stays: Tensor
    member: Tensor

    @classmethod
    def of(cls, group: Tensor, slots: Slots) -> Groups:
        """Make groups from the number of each slot's group, from 0 to n - 1 [batch, kv_heads, n],
        for slots that hold a token.
        """
        step, held = torch.arange(group.shape[2], device=group.device), slots.held[..., None]
        together = (group[..., None] == step) & held
        home = slots.position[..., None].where(together, -1).argmax(dim=2).gather(2, group)
        return cls(home, (home == step) & slots.held, (home[..., None] == step) & held)

    def total(self, log: Tensor) -> Tensor:
        """Return the logarithm of each group's sum, from the logarithms of its members, both
        [batch, kv_heads, n]; -inf for slots that are no home.
        """
        return log[..., None].where(self.member, -torch.inf).logsumexp(dim=2)

    def mean(self, x: Tensor, log: Tensor) -> Tensor:
        """Return each group's mean of `x` [batch, kv_heads, n, dim], float32.

        `log` has the log-weights of the members. The mean is zero for slots that are no home, and
        for a group without weight.
        """
        total = self.total(log)
        share = log[..., None] - total.masked_fill(total.isneginf(), 0.0)[:, :, None]
        return share.exp().where(self.member, 0.0).transpose(2, 3) @ x.float()
