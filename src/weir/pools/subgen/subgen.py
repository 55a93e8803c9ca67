"""SubGen: samples of clusters of keys for the denominator, of long values for the numerator.

SubGen (Zandieh et al. 2024, "SubGen: Token Generation in Sublinear Time and Memory"), Algorithm 1.
The denominator is a sum over clusters of keys, each known by its size and t uniform samples; the
numerator is a sum over s pairs of key and value, drawn with probability proportional to the squared
length of the value. Both sums are unbiased, at every step. What the paper's experiments run instead
is the pool `kcenter`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weir.errors import WeirError
from weir.pools.base import Fold, Pool, is_within
from weir.pools.registry import pool
from weir.pools.subgen.clusters import Clusters, resample
from weir.slab import Slots, pick

PIECE = 64
"""Arrivals looked at together; a whole prompt comes in pieces."""

MOST = 1e300
"""Sums beyond are none of a stream."""

_PAIRS, _SAMPLES, _MERGES = range(3)
"""The purposes of draws, by number."""
_ROOM = 16
"""Clusters there is room for at first, where their number has no limit."""


@pool("subgen")
@dataclass(frozen=True)
class SubGen(Pool):
    """Keep what Algorithm 1 samples of all that arrives, each KV head its own.

    A token drawn several times holds one slot, and what it stands for is added up in its weights; a
    token may stand in one of the two sums or in both. Tokens that come with weights count for as
    much: e^a in the numerator, e^b in the denominator. Nothing flows on.

    Attributes:
        samples: s, pairs that are drawn for the numerator.
        clusters: m, the most clusters there may be. When another one is needed, delta is doubled
            and clusters whose centers are within it become one; keys are then within 2 delta of
            their center. `none` for no limit, as in the paper: slots then grow with the clusters.
        per_cluster: t, keys that are drawn of each cluster.
        delta: the distance of keys within which they share a cluster, or to begin with. "auto"
            begins with the smallest distance among the first m + 1 different keys.
        exact: tokens are kept as they are while all of them fit the slots (without a limit, the
            slots of as many clusters as there are). Otherwise sampling replaces even the first.
    """

    two_weights = True
    ends_pipe = True  # what is kept stands for all that came

    samples: int = 64
    clusters: int | None = 32
    per_cluster: int = 4
    delta: float | str = "auto"
    exact: bool = True

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise WeirError(f"subgen draws at least 1 sample for the numerator, not {self.samples}")
        if self.clusters is not None and self.clusters < 1:
            raise WeirError(
                f"subgen needs at least 1 cluster, not {self.clusters}; "
                "without a limit, write clusters=none"
            )
        if self.per_cluster < 1:
            raise WeirError(f"subgen draws at least 1 key per_cluster, not {self.per_cluster}")
        if isinstance(self.delta, str):
            if self.delta != "auto":
                raise WeirError(f"the delta of subgen is a distance or auto, not {self.delta!r}")
            if self.clusters is None:
                raise WeirError(
                    "subgen finds a delta by the number of clusters there may be; with "
                    "clusters=none it has to be given, as in delta=4.0"
                )
        elif not 0 < self.delta < math.inf:
            raise WeirError(f"the delta of subgen is a distance above 0, not {self.delta}")

    def slots(self) -> int | None:
        """One for each pair and each sampled key, should none of them be the same."""
        if self.clusters is None:
            return None
        return self.samples + self.clusters * self.per_cluster

    def resized(self, slots: int) -> Pool:
        """Samples and clusters in the same proportion; what makes no whole cluster are samples.

        Raises:
            WeirError: there is no room for a cluster and a sample, or there is no limit.
        """
        if self.clusters is None or slots <= self.per_cluster:
            raise WeirError(
                f"subgen with clusters of {self.per_cluster} cannot do with {slots} slots"
            )
        share = slots * self.clusters // (self.samples + self.clusters * self.per_cluster)
        clusters = max(1, share)
        return replace(self, samples=slots - clusters * self.per_cluster, clusters=clusters)

    def state(self, like: Slots) -> dict[str, Tensor]:
        """The fields of `Clusters`, and for each head of each row: `came`, tokens so far, int64;
        `still`, whether they are still kept as they are, bool; `mu`, the sum of the squared lengths
        of their values, float64; and `pairs`, the list M as slots [batch, kv_heads, samples],
        int64, -1 as long as there is none.
        """
        start = 0.0 if isinstance(self.delta, str) else float(self.delta)
        room = _ROOM if self.clusters is None else self.clusters
        came = like.position.new_zeros(like.position.shape[:2])
        return {
            "came": came,
            "still": torch.full_like(came, self.exact, dtype=torch.bool),
            "mu": torch.zeros_like(came, dtype=torch.float64),
            "pairs": came.new_full((*came.shape, self.samples), -1),
            **Clusters.none(like.keys, room, self.per_cluster, start).tensors(),
        }

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """See `Pool.wrong_state`."""
        if not is_within(state["came"], 0, ahead):
            return "came is not a number of tokens"
        if not is_within(state["pairs"], -1, held - 1):
            return "pairs names a slot that is not in use"
        for name in ("mu", "delta", "count"):
            if not is_within(state[name], 0, MOST):
                return f"{name} is not a finite number from 0 on"
        if not bool(state["centre"].isfinite().all()):
            return "centre is not finite"
        if not is_within(state["born"], 0, max(0, ahead - 1)):
            return "born is a place in the stream that no token has had"
        there = state["count"] > 0
        if bool((there[..., 1:] & ~there[..., :-1]).any()):
            return "count leaves out a cluster"
        samples = state["samples"].where(there[..., None], 0)
        if not is_within(samples, 0, max(0, held - 1)) or (held == 0 and bool(there.any())):
            return "samples names a slot that is not in use"
        return None

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        """Let arrivals in one after the other, then keep the tokens that were drawn."""
        if len(new) == 0:
            return held, new
        if not new.finite:
            raise WeirError("subgen was given a key or value that is not finite, near no cluster")
        clusters = Clusters.of_state(fold.state)
        for start in range(0, len(new), PIECE):
            piece, first = new.part(start, start + PIECE), len(held) + start
            self._draw_pairs(piece, first, fold)
            self._cluster(clusters, piece, first, fold)
        kept = self._drawn(held.join(new), clusters, fold)
        fold.state.update(clusters.tensors())
        return kept, new.part(0, 0)

    def _draw_pairs(self, new: Slots, first: int, fold: Fold) -> None:
        """UPDATEMATRIXPRODUCT (lines 24 to 28) and line 6; arrivals lie from slot `first` on."""
        weight = new.a.double().exp() * _squared_lengths(new)
        u = fold.draws.uniforms(_PAIRS, new.position, self.samples)
        last, mu = resample(fold.state["mu"][..., None], weight, torch.zeros_like(new.position), u)
        drawn = last[:, :, 0]
        fold.state["pairs"] = torch.where(drawn >= 0, first + drawn, fold.state["pairs"])
        fold.state["mu"] = mu[..., 0]

    def _cluster(self, clusters: Clusters, new: Slots, first: int, fold: Fold) -> None:
        """UPDATESOFTMAXNORMALIZER, and whether all tokens can still be kept as they are."""
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
        """The tokens that were drawn, with the weights of lines 29 and 30.

        A pair counts for mu / (s |v|^2), and a sample of cluster i for n_i / t, as often as it was
        drawn.
        """
        pairs, still = fold.state["pairs"], fold.state["still"][..., None]
        there = (clusters.count > 0)[..., None]
        samples = torch.where(there, clusters.samples, 0).flatten(2)
        zeros = torch.zeros(both.position.shape, dtype=torch.float64, device=both.position.device)
        times = zeros.scatter_add(2, pairs.clamp_min(0), (pairs >= 0).double())
        share = (clusters.count / self.per_cluster)[..., None].expand_as(clusters.samples)
        below = zeros.scatter_add(2, samples, share.flatten(2))
        # Of those that were drawn alone: lengths of all values would take longer than all the rest.
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
        # Where each of them lies from now on.
        after = stays.cumsum(dim=2) - 1
        fold.state["pairs"] = after.gather(2, pairs.clamp_min(0)).where(pairs >= 0, -1)
        moved = after.gather(2, samples).view_as(clusters.samples)
        clusters.samples = moved.where(there, 0)
        return kept.only(stays)


def _squared_lengths(slots: Slots) -> Tensor:
    """Of the values, zero where a slot is empty [batch, kv_heads, slots], float64."""
    return slots.values.double().square().sum(dim=3).masked_fill(~slots.held, 0.0)
