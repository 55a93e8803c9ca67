"""SubGen's Algorithm 1 token by token, from the papers alone: what `subgen` is checked against.

Zandieh et al. 2024, "SubGen: Token Generation in Sublinear Time and Memory", Algorithm 1, and for a
bounded number of clusters Charikar, Chekuri, Feder and Motwani 1997 ("Incremental clustering and
dynamic information retrieval"), the doubling algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Cluster:
    """An item (x, S, n) of D; `members` are the keys of C, which the algorithm does not keep.

    x, S and members are tokens, which have a `position`, a `key` and a `value`, and may have
    weights `a` and `b`.
    """

    x: Any
    samples: list[Any]
    n: float
    members: list[Any]


@dataclass
class SubGen:
    """One head.

    Attributes:
        s: number of samples of the numerator.
        t: number of samples of each cluster.
        m: the most clusters; None for no limit.
        coin: (purpose, a token's position, number of the sample) -> a number in [0, 1).
        delta: the largest distance of a key from the first key of its cluster; 0 to find one.
        mu: the sum of the weights of all tokens in the numerator.
        pairs: the samples of the numerator.
        clusters: the clusters of the denominator.
        merges: how often a cluster was merged into another.
        came: all tokens that have arrived.
        exact: whether there have been so few tokens that all are still held.
    """

    s: int
    t: int
    m: int | None
    coin: Callable[[str, int, int], float]
    delta: float = 0.0
    mu: float = 0.0
    pairs: list[Any] = field(default_factory=list)
    clusters: list[Cluster] = field(default_factory=list)
    merges: int = 0
    came: list[Any] = field(default_factory=list)
    exact: bool = True

    def take(self, token: Any) -> None:
        """One round of the loop, lines 3 to 10."""
        self.update_softmax_normalizer(token)
        self.update_matrix_product(token)
        self.came.append(token)
        clusters = len(self.clusters) if self.m is None else self.m
        if len(self.came) > self.s + clusters * self.t:
            self.exact = False

    def update_softmax_normalizer(self, token: Any) -> None:
        """Lines 11 to 23."""
        weight = math.exp(getattr(token, "b", 0.0))
        while True:
            near = [math.dist(cluster.x.key, token.key) for cluster in self.clusters]
            if near and min(near) <= self.delta:
                cluster = self.clusters[near.index(min(near))]
                cluster.n += weight
                cluster.members.append(token)
                for j in range(self.t):
                    if self.coin("sample", token.position, j) < weight / cluster.n:
                        cluster.samples[j] = token
                return
            if self.m is None or len(self.clusters) < self.m:
                self.clusters.append(Cluster(token, [token] * self.t, weight, [token]))
                return
            self.double_delta(min(near))

    def double_delta(self, nearest: float) -> None:
        """Widen delta because there is a cluster too many, and merge clusters that are near each
        other.
        """
        if self.delta > 0:
            self.delta *= 2
        else:
            self.delta = nearest
            for place, one in enumerate(self.clusters):
                for other in self.clusters[place + 1 :]:
                    self.delta = min(self.delta, math.dist(one.x.key, other.x.key))
        rest, stay = self.clusters, []
        while rest:
            first, others, rest = rest[0], rest[1:], []
            stay.append(first)
            for other in others:
                if math.dist(first.x.key, other.x.key) > self.delta:
                    rest.append(other)
                    continue
                self.merges += 1
                first.n += other.n
                first.members += other.members
                for j in range(self.t):
                    if self.coin("merge", other.x.position, j) < other.n / first.n:
                        first.samples[j] = other.samples[j]
        self.clusters = stay

    def update_matrix_product(self, token: Any) -> None:
        """Lines 24 to 28, and line 6."""
        weight = math.exp(getattr(token, "a", 0.0)) * sum(x * x for x in token.value)
        if weight == 0:
            return
        if not self.pairs:
            self.pairs = [token] * self.s
        for i in range(self.s):
            if self.coin("pair", token.position, i) < weight / (self.mu + weight):
                self.pairs[i] = token
        self.mu += weight

    def weights(self) -> dict[int, tuple[float, float]]:
        """The weights of each kept token in line 29 and in line 30, by its position."""
        if self.exact:
            return {
                token.position: tuple(math.exp(getattr(token, name, 0.0)) for name in ("a", "b"))
                for token in self.came
            }
        above: dict[int, float] = {}
        below: dict[int, float] = {}
        for token in self.pairs:
            share = self.mu / (self.s * sum(x * x for x in token.value))
            above[token.position] = above.get(token.position, 0.0) + share
        for cluster in self.clusters:
            for token in cluster.samples:
                share = cluster.n / self.t
                below[token.position] = below.get(token.position, 0.0) + share
        places = sorted({*above, *below})
        return {place: (above.get(place, 0.0), below.get(place, 0.0)) for place in places}
