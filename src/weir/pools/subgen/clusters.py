"""Clusters of keys that grow with a stream, and samples of each: SubGen's denominator.

SubGen (Zandieh et al. 2024), Algorithm 1, lines 11 to 23, and for a bounded number of clusters the
doubling algorithm of its reference [3] (Charikar, Chekuri, Feder and Motwani 1997). Knows keys and
the numbers of the slots they lie in; nothing of values, weights of slots or queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from weir import kernels


def resample(total: Tensor, weight: Tensor, into: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted reservoirs: who holds each entry after some arrivals, as if they came one by one.

    By a kernel where there is one, which gives what `reservoirs` does.

    An arrival of weight w, joining what weighs W, takes each entry with probability w / (W + w),
    independently. So every entry is, at all times, one draw of all that came, by weight.

    Args:
        total: what came into each reservoir so far [batch, kv_heads, reservoirs], float64.
        weight: of the arrivals [batch, kv_heads, n], float64; zero for none.
        into: the reservoir each goes to [batch, kv_heads, n], int64.
        u: uniform in [0, 1), of each arrival for each entry [batch, kv_heads, n, entries].

    Returns:
        The last arrival that took each entry [batch, kv_heads, reservoirs, entries], -1 for none;
        and the new totals.
    """
    by_kernel = kernels.resample(u.device)
    found: tuple[Tensor, Tensor] = (by_kernel or reservoirs)(total, weight, into, u)
    return found


def reservoirs(total: Tensor, weight: Tensor, into: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """`resample` in PyTorch, which a kernel must equal; arguments as there."""
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


SAVED_NAMES = {"center": "centre"}
"""Names in session files that are older than the fields'."""


@dataclass
class Clusters:
    """The list D of Algorithm 1, for every head of every row, the oldest cluster first.

    Attributes:
        delta: the distance within which a key joins a cluster [batch, kv_heads], float64; 0 until
            there is a reason to choose one.
        count: n_i, the weight of all keys that joined [batch, kv_heads, clusters], float64; 0 where
            there is no cluster (yet).
        center: x_i [batch, kv_heads, clusters, key_dim].
        born: the place of x_i in the stream [batch, kv_heads, clusters], int64.
        samples: S_i, as slots [batch, kv_heads, clusters, per_cluster], int64.
    """

    delta: Tensor
    count: Tensor
    center: Tensor
    born: Tensor
    samples: Tensor

    @classmethod
    def none(cls, like: Tensor, room: int, per_cluster: int, delta: float) -> Clusters:
        """No clusters, with room for some, for keys as `like` [batch, kv_heads, any, key_dim]."""
        shape, device = like.shape[:2], like.device
        return cls(
            delta=torch.full(shape, delta, dtype=torch.float64, device=device),
            count=torch.zeros((*shape, room), dtype=torch.float64, device=device),
            center=like.new_zeros((*shape, room, like.shape[3])),
            born=torch.zeros((*shape, room), dtype=torch.int64, device=device),
            samples=torch.zeros((*shape, room, per_cluster), dtype=torch.int64, device=device),
        )

    @classmethod
    def of_state(cls, state: Mapping[str, Tensor]) -> Clusters:
        """The clusters in a pool's state."""
        return cls(**{f.name: state[SAVED_NAMES.get(f.name, f.name)] for f in fields(cls)})

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their names in a pool's state."""
        return {SAVED_NAMES.get(f.name, f.name): getattr(self, f.name) for f in fields(self)}

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
        """Let keys in, one after the other: UPDATESOFTMAXNORMALIZER.

        All keys up to the first that is near no cluster join at once; then that one opens a
        cluster, and so on: the loop is over the clusters that open, not over keys.

        Args:
            keys: [batch, kv_heads, n, key_dim]; they lie in the slots from `first` on.
            weight: what each counts for [batch, kv_heads, n], float64; zero for none at all.
            born: their places in the stream [batch, kv_heads, n].
            u: uniform in [0, 1), of each key for each entry [batch, kv_heads, n, per_cluster].
            first: the slot of the first of them.
            limit: clusters there may be; None for no limit.
            draw: from `born` of clusters to the uniform numbers of each when it goes into another.

        Returns:
            Which of the keys opened a cluster [batch, kv_heads, n], bool.
        """
        n = keys.shape[2]
        step = torch.arange(n, device=keys.device)
        opened = torch.zeros_like(weight, dtype=torch.bool)
        done = torch.zeros_like(self.used)
        distances = self._distances(keys)
        while True:
            near, nearest = distances.min(dim=3)
            waits = (step >= done) & (weight > 0)
            alone = waits & (near > self.delta[..., None])
            stop = step.where(alone, n).amin(dim=2, keepdim=True)
            self._join(weight.where(waits & (step < stop), 0.0), nearest, u, first)
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
            self.center = torch.where(here[..., None], key, self.center)
            self.samples = torch.where(here[..., None], first + at[..., None], self.samples)
            done = stop + opens.long()
            if merges or self.count.shape[2] > room:
                distances = self._distances(keys)
            else:
                distances = torch.where(here[:, :, None], _distance(keys, key), distances)

    def _distances(self, keys: Tensor) -> Tensor:
        """From keys to centers [batch, kv_heads, n, clusters]; infinite where there is none."""
        return _distance(keys, self.center).masked_fill(self.count[:, :, None] == 0, torch.inf)

    def _join(self, weight: Tensor, into: Tensor, u: Tensor, first: int) -> None:
        """Lines 14 to 18: keys of a weight above zero join clusters."""
        last, self.count = resample(self.count, weight, into, u)
        self.samples = torch.where(last >= 0, first + last, self.samples)

    def _make_room(self, stuck: Tensor) -> None:
        """Twice as many clusters, where one is to open and there is no place for it."""
        room = self.count.shape[2]
        if bool((stuck & (self.used == room)).any()):
            self.count, self.born = (F.pad(t, (0, room)) for t in (self.count, self.born))
            self.center = F.pad(self.center, (0, 0, 0, room))
            self.samples = F.pad(self.samples, (0, 0, 0, room))

    def _merge(self, full: Tensor, near: Tensor, draw: Callable[[Tensor], Tensor]) -> None:
        """Double delta, and let clusters whose centers are now within it go into the oldest such.

        Without chains: what a cluster goes into goes nowhere itself. From 0, delta becomes the
        smallest distance there is. Each entry of the cluster that stays becomes the other's with
        probability n_other / (n_both).

        Args:
            full: the heads it is about [batch, kv_heads, 1], bool.
            near: how near the waiting key is to a center [batch, kv_heads, 1].
            draw: from `born` to the uniform numbers of each cluster that goes.
        """
        step = torch.arange(self.count.shape[2], device=near.device)
        between = self._distances(self.center)
        between = between.masked_fill(step[:, None] == step, torch.inf)
        smallest = between.amin(dim=(2, 3)).minimum(near[..., 0])
        wider = torch.where(self.delta > 0, 2 * self.delta, smallest)
        self.delta = torch.where(full[..., 0], wider, self.delta)
        close = (between <= self.delta[..., None, None]) & full[..., None]
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
        self.center = self.center.gather(2, order[..., None].expand(self.center.shape))
        self.samples = self.samples.gather(2, order[..., None].expand(self.samples.shape))


def _distance(keys: Tensor, others: Tensor) -> Tensor:
    """Euclidean distances, float64, from differences: equal keys are at a distance of zero."""
    kernel = kernels.distances(keys.device)
    if kernel is not None:
        found: Tensor = kernel(keys, others)
        return found
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cdist(keys.double(), others.double(), compute_mode=exact)
