"""SubGen: samples of clusters of keys for the denominator, and of long values for the numerator.

SubGen (Zandieh et al. 2024, "SubGen: Token Generation in Sublinear Time and Memory",
arXiv:2402.06082), Algorithm 1. The denominator is a sum over clusters of keys, each known by its
size and t uniform samples; the numerator is a sum over s pairs of key and value, drawn with
probability proportional to the squared length of the value. Both sums are unbiased, at every step.
If the number of clusters is limited, clusters are joined by the doubling algorithm of the paper's
reference [3] (Charikar, Chekuri, Feder and Motwani 1997). What the paper's experiments run instead
is the pool `kcenter`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from weir import kernels
from weir.errors import WeirError
from weir.pools.base import FINITE, FROM_0, Fold, Pool, find_outside
from weir.pools.parameters import Bounds, Count
from weir.pools.registry import pool
from weir.slab import Slots, pick

PIECE = 64
"""Number of arrivals processed together. A whole prompt comes in pieces."""
_PAIRS, _SAMPLES, _MERGES = range(3)
"""The purposes of draws, by number."""
_ROOM = 16
"""Number of clusters that there is room for at first, if their number has no limit."""


@pool("subgen")
@dataclass(frozen=True)
class SubGen(Pool):
    """Keep the samples that Algorithm 1 draws from all arrivals, separately for each KV head.

    A token that is drawn several times takes one slot, with its draws added up in its weights. A
    token may be in one of the two sums or in both. Tokens that come with weights count accordingly:
    e^a in the numerator, e^b in the denominator. No token overflows.

    Attributes:
        samples: s, the number of pairs that are drawn for the numerator.
        clusters: m, the most clusters. When another one is needed, delta is doubled, and clusters
            whose centers are at most delta apart are joined. Keys are then within 2 delta of their
            center. `none` for no limit, as in the paper: slots then grow with the clusters.
        per_cluster: t, the number of keys that are drawn from each cluster.
        delta: the distance within which keys share a cluster; if clusters are limited, the initial
            distance. "auto" begins with the smallest distance among the first m + 1 different keys.
        exact: whether tokens are kept exactly while all of them fit in the slots. Without a limit,
            these are the slots for the pairs and for the clusters so far. If `exact` is false,
            sampling begins with the first token.
    """

    two_weights = True
    ends_pipe = True  # the kept tokens represent all that came

    samples: Count = 64
    clusters: Count | None = 32
    per_cluster: Count = 4
    delta: Annotated[float, Bounds(0, without=0)] | Literal["auto"] = "auto"
    exact: bool = True

    def __post_init__(self) -> None:
        if self.delta == "auto" and self.clusters is None:
            raise WeirError(
                "subgen needs a delta if clusters=none, because it chooses delta by the number of "
                "clusters. Write, for example, delta=4.0."
            )

    def slots(self) -> int | None:
        """Return one slot for each pair and each sampled key, in case none of them are the same.
        None if the number of clusters has no limit.
        """
        if self.clusters is None:
            return None
        return self.samples + self.clusters * self.per_cluster

    def resized(self, slots: int) -> Pool:
        """Resize samples and clusters in proportion. A remainder too small for a cluster goes to
        samples.
        """
        if self.clusters is None or slots <= self.per_cluster:
            raise WeirError(
                f"subgen needs a limit of clusters, and more than {self.per_cluster} slots (one "
                f"cluster), got clusters={'none' if self.clusters is None else self.clusters} and "
                f"{slots} slots. Set clusters, or use a larger budget."
            )
        share = slots * self.clusters // (self.samples + self.clusters * self.per_cluster)
        clusters = max(1, share)
        return replace(self, samples=slots - clusters * self.per_cluster, clusters=clusters)

    def state(self, like: Slots) -> dict[str, Tensor]:
        """Make the state.

        It has the fields of `Clusters`, and for each head of each row: `came`, the number of
        tokens so far, int64; `still`, whether they are still kept exactly, bool; `mu`, the sum of
        the squared lengths of their values, float64; and `pairs`, the slots of the list M of
        Algorithm 1 [batch, kv_heads, samples], int64, -1 as long as there is none.
        """
        room = _ROOM if self.clusters is None else self.clusters
        came = like.position.new_zeros(like.position.shape[:2])
        mu = torch.zeros_like(came, dtype=torch.float64)
        return {
            "came": came,
            "still": torch.full_like(came, self.exact, dtype=torch.bool),
            "mu": mu,
            "pairs": came.new_full((*came.shape, self.samples), -1),
            "delta": torch.full_like(mu, 0.0 if self.delta == "auto" else float(self.delta)),
            "count": mu.new_zeros((*mu.shape, room)),
            "centre": like.keys.new_zeros((*mu.shape, room, like.keys.shape[3])),
            "born": came.new_zeros((*came.shape, room)),
            "samples": came.new_zeros((*came.shape, room, self.per_cluster)),
        }

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """See `Pool.wrong_state`."""
        there = state["count"] > 0
        if bool((there[..., 1:] & ~there[..., :-1]).any()):
            return "count skips a cluster"
        if held == 0 and bool(there.any()):
            return "samples contains a slot that is not in use"
        return find_outside(
            {**state, "samples": state["samples"].where(there[..., None], 0)},
            **dict.fromkeys(("mu", "delta", "count"), FROM_0),
            came=(0, ahead),
            pairs=(-1, held - 1),
            centre=FINITE,
            born=(0, max(0, ahead - 1)),
            samples=(0, max(0, held - 1)),
        )

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Let arrivals in one after the other, then keep the tokens that were drawn."""
        if len(new) == 0:
            return held, new
        if not new.finite:
            raise WeirError(
                "subgen got a key or value that is not finite, so it belongs to no cluster. Check "
                "the model."
            )
        clusters = Clusters(*(fold.state[name] for name in Clusters.__dataclass_fields__))
        for start in range(0, len(new), PIECE):
            piece, first = new.part(start, start + PIECE), len(held) + start
            self._draw_pairs(piece, first, fold)
            self._cluster(clusters, piece, first, fold)
        kept = self._drawn(held.join(new), clusters, fold)
        fold.state.update(vars(clusters))
        return kept, new.part(0, 0)

    def _draw_pairs(self, new: Slots, first: int, fold: Fold) -> None:
        """Draw pairs for the numerator (UPDATEMATRIXPRODUCT, lines 24 to 28, and line 6). Arrivals
        begin at slot `first`.
        """
        squared_lengths = new.values.double().square().sum(dim=3).masked_fill(~new.held, 0.0)
        weight = new.a.double().exp() * squared_lengths
        u = fold.draws.uniforms(_PAIRS, new.position, self.samples)
        last, mu = resample(fold.state["mu"][..., None], weight, torch.zeros_like(new.position), u)
        drawn = last[:, :, 0]
        fold.state["pairs"] = torch.where(drawn >= 0, first + drawn, fold.state["pairs"])
        fold.state["mu"] = mu[..., 0]

    def _cluster(self, clusters: Clusters, new: Slots, first: int, fold: Fold) -> None:
        """Add arrivals to the clusters (UPDATESOFTMAXNORMALIZER), and find whether all tokens can
        still be kept exactly.
        """
        before = clusters.used
        opened = clusters.take(
            new.keys,
            new.b.double().exp(),
            new.position,
            fold.draws.uniforms(_SAMPLES, new.position, self.per_cluster),
            first,
            self.clusters,
            lambda born: fold.draws.uniforms(_MERGES, born, self.per_cluster),
        )
        came = fold.state["came"][..., None] + new.held.cumsum(dim=2)
        count = before + opened.cumsum(dim=2) if self.clusters is None else self.clusters
        fits = (came <= self.samples + count * self.per_cluster).all(dim=2)
        fold.state["still"] = fold.state["still"] & fits
        fold.state["came"] = came[..., -1]

    def _drawn(self, both: Slots, clusters: Clusters, fold: Fold) -> Slots:
        """Return the tokens that were drawn, with the weights of lines 29 and 30, times the number
        of their draws.

        The weights are mu / (s |v|^2) for a pair, and n_i / t for a sample of cluster i.
        """
        pairs, still = fold.state["pairs"], fold.state["still"][..., None]
        there = (clusters.count > 0)[..., None]
        samples = torch.where(there, clusters.samples, 0).flatten(2)
        zeros = torch.zeros(both.position.shape, dtype=torch.float64, device=both.position.device)
        times = zeros.scatter_add(2, pairs.clamp_min(0), (pairs >= 0).double())
        share = (clusters.count / self.per_cluster)[..., None].expand_as(clusters.samples)
        below = zeros.scatter_add(2, samples, share.flatten(2))
        # Only for drawn tokens: computing the lengths of all values would take longer than
        # everything else.
        drawn = pairs.clamp_min(0)
        lengths = pick(both.values, drawn).double().square().sum(dim=3)
        each = fold.state["mu"][..., None] / (self.samples * lengths)
        above = torch.where(times > 0, times * zeros.scatter(2, drawn, each), 0.0)
        kept = replace(
            both,
            a=torch.where(still, both.a, above.log().to(both.a.dtype)),
            b=torch.where(still, both.b, below.log().to(both.b.dtype)),
        )
        stays = torch.where(still, both.held, (times > 0) | (below > 0))
        # The new slot of each token that stays.
        after = stays.cumsum(dim=2) - 1
        fold.state["pairs"] = after.gather(2, pairs.clamp_min(0)).where(pairs >= 0, -1)
        moved = after.gather(2, samples).view_as(clusters.samples)
        clusters.samples = moved.where(there, 0)
        return kept.only(stays)


def resample(total: Tensor, weight: Tensor, into: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Fill weighted reservoirs, as if arrivals came one by one.

    Returns the last arrival that took each entry, -1 for none [batch, kv_heads, reservoirs,
    entries], and the new totals. An arrival of weight w that joins a reservoir of weight W takes
    each entry with probability w / (W + w), independently. So every entry is, at all times, one
    draw from all that came, with probabilities proportional to their weights.

    Args:
        total: total weight of each reservoir so far [batch, kv_heads, reservoirs], float64.
        weight: weights of the arrivals [batch, kv_heads, n], float64; zero for none.
        into: the reservoir of each arrival [batch, kv_heads, n], int64.
        u: uniform in [0, 1), of each arrival for each entry [batch, kv_heads, n, entries].
    """
    by_kernel = kernels.resample(u.device) or reservoirs
    return by_kernel(total, weight, into, u)


def reservoirs(total: Tensor, weight: Tensor, into: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The PyTorch version of `resample`, with the same arguments. Kernels must return the same."""
    count, entries = total.shape[2], u.shape[3]
    each = F.one_hot(into, count) * weight[..., None]
    running = torch.cat([total[:, :, None], each], dim=2).cumsum(dim=2)
    after = running[:, :, 1:].gather(3, into[..., None])
    arrival = torch.arange(weight.shape[2], device=weight.device)[:, None].expand(u.shape)
    arrival = arrival.where(u * after < weight[..., None], -1)
    place = into[..., None] * entries + torch.arange(entries, device=into.device)
    last = place.new_full((*total.shape[:2], count * entries), -1)
    last = last.scatter_reduce(2, place.flatten(2), arrival.flatten(2), "amax")
    return last.view(*total.shape, entries), running[:, :, -1]


@dataclass
class Clusters:
    """The list D of Algorithm 1, for every head of every row, the oldest cluster first.

    Attributes:
        delta: the distance within which a key joins a cluster [batch, kv_heads], float64; 0 until
            it is chosen, for `delta="auto"`.
        count: n_i, the weight of all keys that joined [batch, kv_heads, clusters], float64; 0 where
            there is no cluster (yet).
        centre: x_i, the center of each cluster [batch, kv_heads, clusters, key_dim]. The name is
            spelled as in saved sessions.
        born: the place of x_i in the stream [batch, kv_heads, clusters], int64.
        samples: S_i, as numbers of slots [batch, kv_heads, clusters, per_cluster], int64.
    """

    delta: Tensor
    count: Tensor
    centre: Tensor
    born: Tensor
    samples: Tensor

    @property
    def used(self) -> Tensor:
        """The number of clusters [batch, kv_heads, 1]."""
        return (self.count > 0).sum(dim=2, keepdim=True)

    def take(
        self,
        keys: Tensor,
        weight: Tensor,
        born: Tensor,
        u: Tensor,
        first: int,
        limit: int | None,
        draw: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Let keys in one after the other (UPDATESOFTMAXNORMALIZER).

        Returns which keys opened a cluster [batch, kv_heads, n], bool. All keys up to the first
        that is near no cluster join at once; then that key opens a cluster, and so on. The loop is
        over the clusters that open, not over keys.

        Args:
            keys: [batch, kv_heads, n, key_dim].
            weight: the weight of each key, float64; zero for none.
            born: the place of each key in the stream.
            u: uniform in [0, 1), of each key for each entry [batch, kv_heads, n, per_cluster].
            first: the slot of the first key.
            limit: the most clusters; None for no limit.
            draw: maps `born` of clusters to the uniform numbers that each cluster uses when it is
                joined into another.
        """
        n = keys.shape[2]
        step = torch.arange(n, device=keys.device)
        opened = torch.zeros_like(weight, dtype=torch.bool)
        done = torch.zeros_like(self.used)
        distances = self._distances(keys)
        while True:
            near = distances.amin(dim=3)
            # Among equally near clusters, the first. An infinite distance is equal to itself.
            most = near * (1 + kernels.ALIKE)
            nearest = (distances <= most[..., None]).to(torch.uint8).argmax(dim=3)
            waits = (step >= done) & (weight > 0)
            alone = waits & (near > self.delta[..., None] * (1 + kernels.ALIKE))
            stop = step.where(alone, n).amin(dim=2, keepdim=True)
            # Lines 14 to 18.
            joins = weight.where(waits & (step < stop), 0.0)
            last, self.count = resample(self.count, joins, nearest, u)
            self.samples = torch.where(last >= 0, first + last, self.samples)
            stuck = stop < n
            if not bool(stuck.any()):
                return opened
            at = stop.clamp_max(n - 1)
            room = self.count.shape[2]
            if limit is None:
                self._make_room(stuck)
            full = stuck & (self.used == limit) if limit is not None else torch.zeros_like(stuck)
            merges = bool(full.any())
            if merges:
                self._merge(full, near.gather(2, at), draw)
            opens = stuck & ~full
            opened |= opens & (step == at)
            here = opens & (torch.arange(self.count.shape[2], device=keys.device) == self.used)
            self.count = torch.where(here, weight.gather(2, at), self.count)
            self.born = torch.where(here, born.gather(2, at), self.born)
            key = keys.gather(2, at[..., None].expand(-1, -1, 1, keys.shape[3]))
            self.centre = torch.where(here[..., None], key, self.centre)
            self.samples = torch.where(here[..., None], first + at[..., None], self.samples)
            done = stop + opens.long()
            if merges or self.count.shape[2] > room:
                distances = self._distances(keys)
            else:
                distances = torch.where(here[:, :, None], _distance(keys, key), distances)

    def _distances(self, keys: Tensor) -> Tensor:
        """Return distances from keys to centers [batch, kv_heads, n, clusters]; infinite where
        there is none.
        """
        return _distance(keys, self.centre).masked_fill(self.count[:, :, None] == 0, torch.inf)

    def _make_room(self, stuck: Tensor) -> None:
        """Double the room for clusters if one must open and there is no place for it."""
        room = self.count.shape[2]
        if bool((stuck & (self.used == room)).any()):
            self.count, self.born = (F.pad(t, (0, room)) for t in (self.count, self.born))
            self.centre = F.pad(self.centre, (0, 0, 0, room))
            self.samples = F.pad(self.samples, (0, 0, 0, room))

    def _merge(self, full: Tensor, near: Tensor, draw: Callable[[Tensor], Tensor]) -> None:
        """Double delta, and join clusters whose centers are at most that far apart to the oldest
        of them.

        There are no chains: a cluster that another joins does not join a third. If delta is 0, it
        becomes the smallest distance between two centers, or `near` if that is less. Each entry of
        the cluster that stays is replaced by the other's entry with probability n_other / n_both.
        `full` marks the heads in which clusters must be joined [batch, kv_heads, 1], bool, and
        `near` is the distance of the waiting key to the nearest center.
        """
        step = torch.arange(self.count.shape[2], device=near.device)
        between = self._distances(self.centre)
        between = between.masked_fill(step[:, None] == step, torch.inf)
        smallest = between.amin(dim=(2, 3)).minimum(near[..., 0])
        wider = torch.where(self.delta > 0, 2 * self.delta, smallest)
        self.delta = torch.where(full[..., 0], wider, self.delta)
        close = (between <= self.delta[..., None, None] * (1 + kernels.ALIKE)) & full[..., None]
        close &= (self.count > 0)[..., None] & (step > step[:, None])
        goes = step.expand(self.count.shape).clone()
        gone = torch.zeros_like(self.count, dtype=torch.bool)
        for i in range(len(step)):
            follows = close[:, :, i] & ~gone[:, :, i : i + 1] & ~gone
            goes = goes.masked_fill(follows, i)
            gone = gone | follows
        stays, moves = self.count.masked_fill(gone, 0.0), self.count.where(gone, 0.0)
        last, self.count = resample(stays, moves, goes, draw(self.born))
        theirs = self.samples.gather(2, last.clamp_min(0))
        self.samples = torch.where(last >= 0, theirs, self.samples)
        order = gone.to(torch.uint8).argsort(dim=2, stable=True)
        self.count, self.born = self.count.gather(2, order), self.born.gather(2, order)
        self.centre = self.centre.gather(2, order[..., None].expand(self.centre.shape))
        self.samples = self.samples.gather(2, order[..., None].expand(self.samples.shape))


def _distance(keys: Tensor, others: Tensor) -> Tensor:
    """Euclidean distances, float64, from differences, so that equal keys have a distance of
    zero.
    """
    kernel = kernels.distances(keys.device)
    if kernel is not None:
        return kernel(keys, others)
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(keys.double(), others.double(), compute_mode=exact)
