"""Scores of tokens with plain numbers, from the papers' formulas: what `scores` is checked against.

A `Sight` is what one head sees at one fold. Each function returns a score for each token that the
pool holds or receives, by its place in the stream. The pools' files name the papers.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reference.reading import query_place, rotated, share_of

Scores = dict[int, float]


@dataclass
class Sight:
    """What one KV head sees at one fold.

    Attributes:
        mine: the places of the pool's tokens, held and arriving, in order.
        frame: the position at which each token in the cache is read, by its place in the stream.
        queries: for every place of the stream, a query without rotation for each head of the group.
        keys, values: for every place of the stream, the key without rotation, and the value.
        seen: tokens of the stream so far.
        first: the number of the group's first query head.
        positions, form: those of the layer.
    """

    mine: list[int]
    frame: dict[int, int]
    queries: list[list[list[float]]]
    keys: list[list[float]]
    values: list[list[float]]
    seen: int
    first: int
    positions: Any
    form: Any

    @property
    def group(self) -> range:
        return range(len(self.queries[0]))

    def key(self, place: int) -> list[float]:
        return rotated(self.keys[place], self.frame[place], self.positions)

    def window(self, count: int) -> range:
        return range(max(0, self.seen - count), self.seen)

    def shares(self, query: int, one: int) -> tuple[Scores, float]:
        there = sorted(self.frame)
        return share_of(
            self.queries[query][one],
            {p: self.keys[p] for p in there},
            self.frame,
            query,
            query_place(there, self.frame, query),
            self.positions,
            self.form,
            self.first + one,
            newest=self.seen - 1,
        )

    def mean_share(self, window: int) -> Scores:
        """The mean share of each token, over the last queries that exist and the heads of the
        group.
        """
        total = dict.fromkeys(self.mine, 0.0)
        for query in self.window(window):
            for one in self.group:
                share, _ = self.shares(query, one)
                for p in self.mine:
                    total[p] += share[p]
        count = min(window, self.seen) * len(self.group)
        return {p: x / count for p, x in total.items()}


def dot(x: list[float], y: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def length(x: list[float]) -> float:
    return math.sqrt(dot(x, x))


def softmaxed(x: Scores) -> Scores:
    top = max(x.values(), default=0.0)
    power = {p: math.exp(y - top) for p, y in x.items()}
    return {p: y / math.fsum(power.values()) for p, y in power.items()}


def pooled(x: Scores, kernel: int, how: Callable[[list[float]], float]) -> Scores:
    """Pool scores over the places around each token. A place without a token counts as 0."""
    reach = range(-(kernel // 2), kernel // 2 + 1)
    return {p: how([x.get(p + step, 0.0) for step in reach]) for p in x}


def deviation(x: list[float], correction: int) -> float:
    mean = math.fsum(x) / len(x)
    return math.sqrt(math.fsum((y - mean) ** 2 for y in x) / (len(x) - correction))


def knorm(s: Sight) -> Scores:
    return {p: -length(s.key(p)) for p in s.mine}


def keydiff(s: Sight) -> Scores:
    keys = {p: s.key(p) for p in s.mine}
    anchor = [math.fsum(k[i] / length(k) for k in keys.values()) for i in range(len(s.keys[0]))]
    return {p: -dot(k, anchor) / length(k) / length(anchor) for p, k in keys.items()}


def curdkv(s: Sight, window: int | None = 16) -> Scores:
    out = {}
    size = len(s.mine) if window is None else window
    for start in range(0, len(s.mine), size):
        part = s.mine[start : start + size]
        keys = math.fsum(length(s.key(p)) ** 2 for p in part)
        values = math.fsum(length(s.values[p]) ** 2 for p in part)
        for p in part:
            out[p] = length(s.key(p)) ** 2 / keys * length(s.values[p]) ** 2 / values
    return out


def scissorhands(s: Sight, window: int) -> Scores:
    counts = dict.fromkeys(s.mine, 0.0)
    for query in s.window(window):
        saw = sum(p <= query for p in s.frame)
        for one in s.group:
            share, _ = s.shares(query, one)
            for p in s.mine:
                counts[p] += share[p] >= 1 / max(1, saw)
    return counts


def rkv(s: Sight, window: int, kernel: int, weight: float, alike: float) -> Scores:
    older = [p for p in s.mine if p < s.seen - window]
    attention = dict.fromkeys(s.mine, 0.0)
    for query in s.window(window):
        logits = {}
        for one in s.group:
            share, below = s.shares(query, one)
            for p in older:
                if p <= query:
                    logit = math.log(share[p]) + below
                    logits[p] = max(logits.get(p, -math.inf), logit)
        for p, x in softmaxed(logits).items():
            attention[p] += x / window
    attention = pooled(attention, kernel, max)
    total = dict.fromkeys(s.mine, 0.0)
    keys = {p: s.key(p) for p in s.mine}
    for p, k in keys.items():
        cosines = {q: dot(k, o) / length(k) / length(o) for q, o in keys.items() if q != p}
        like = [q for q, cosine in cosines.items() if cosine > alike]
        for q, cosine in cosines.items():
            if not like or q != max(like):
                total[q] += cosine / len(s.mine)
    redundancy = softmaxed(total)
    return {
        p: weight * attention[p] - (1 - weight) * redundancy[p] if p in older else math.inf
        for p in s.mine
    }


def critical(s: Sight, window: int, n: int, first: float, floor: float) -> Scores:
    attention = s.mean_share(window)
    best = sorted(s.mine, key=lambda p: (-attention[p], p))[: int(n * first)]
    return {
        p: math.inf if p in best else (attention[p] + floor) * math.fsum(map(abs, s.values[p]))
        for p in s.mine
    }


def caote(s: Sight, window: int) -> Scores:
    """By computing the attention again without each token."""
    total = dict.fromkeys(s.mine, 0.0)
    for query in s.window(window):
        for one in s.group:
            share, _ = s.shares(query, one)
            whole = answer(share, s.values)
            for p in s.mine:
                rest = {q: x / (1 - share[p]) for q, x in share.items() if q != p}
                left = answer(rest, s.values)
                total[p] += length([a - b for a, b in zip(whole, left, strict=True)])
    return {p: x / (window * len(s.group)) for p, x in total.items()}


def answer(share: Scores, values: list[list[float]]) -> list[float]:
    return [math.fsum(x * values[p][i] for p, x in share.items()) for i in range(len(values[0]))]


def vase(s: Sight, window: int, n: int, wide: int, kernel: int, noise: Scores) -> Scores:
    weight = pooled(s.mean_share(window), kernel, lambda x: math.fsum(x) / kernel)
    reach = {p: max(s.values[p]) - min(s.values[p]) for p in s.mine}
    best = sorted(s.mine, key=lambda p: (-reach[p], p))[:wide]
    return {p: math.inf if p in best else math.log(weight[p]) + noise[p] for p in s.mine}


def lagkv(s: Sight, lag: int, told: Scores) -> Scores:
    """By comparing each stretch of `lag` places with the next one. Scores in `told` stay."""
    there = [p for p in s.frame if p in s.mine or p > max(s.mine)]
    out = {}
    for p in s.mine:
        stretch = p // lag
        if p in told:
            out[p] = told[p]
        elif (stretch + 2) * lag > s.seen:
            out[p] = math.inf
        else:
            mates = [q for q in there if q // lag == stretch]
            after = [q for q in there if q // lag == stretch + 1]
            out[p] = 0.0
            for each in (lambda q: rotated(s.keys[q], q, s.positions), lambda q: s.values[q]):
                spread = {}
                for q in mates:
                    relative = []
                    for i, x in enumerate(each(q)):
                        low = min(each(r)[i] for r in after)
                        high = max(each(r)[i] for r in after)
                        relative.append((x - low) / (high - low))
                    spread[q] = deviation(relative, 1)
                out[p] += softmaxed(spread)[p] * len(mates) / lag / 2
    return out


def keyformer(
    s: Sight, told: Scores, fresh: range, hot: float, over: int, noise: Callable[..., float]
) -> Scores:
    out = {p: told.get(p, 0.0) for p in s.mine}
    for query in fresh:
        tau = 1 + (hot - 1) * min(1.0, query / over)
        for one in s.group:
            share, below = s.shares(query, one)
            noisy = {
                p: (math.log(share[p]) + below + noise(p, query, one)) / tau
                for p in s.mine
                if p <= query
            }
            for p, x in softmaxed(noisy).items():
                out[p] += x
    return out


def expected(s: Sight, ahead: int, queries: int, covariance: bool, floor: float) -> Scores:
    """By each query's mean logit over the next `ahead` places, for a Gaussian of such queries."""
    mean = dict.fromkeys(s.mine, 0.0)
    for one in s.group:
        logits = {}
        for p in s.mine:
            key = s.key(p)
            each = [
                math.fsum(
                    dot(rotated(s.queries[query][one], s.seen + step, s.positions), key)
                    for step in range(ahead)
                )
                / ahead
                * s.form.scale
                for query in s.window(queries)
            ]
            middle = math.fsum(each) / len(each)
            logits[p] = middle + covariance * deviation(each, 0) ** 2 / 2
        for p, x in softmaxed(logits).items():
            mean[p] += x / len(s.group)
    return {p: math.log((mean[p] + floor) * length(s.values[p])) for p in s.mine}


def tri(s: Sight, offsets: list[int], queries: int) -> Scores:
    """By cosines of each pair of dimensions, with complex numbers."""
    turns = s.positions.rotary.frequencies.tolist()
    half = len(turns)
    best = dict.fromkeys(s.mine, -math.inf)
    for one in s.group:
        asked = [s.queries[query][one] for query in s.window(queries)]
        scaling = s.positions.rotary.scaling
        score = {}
        for p in s.mine:
            key, total = s.keys[p], 0.0
            for i, radians in enumerate(turns):
                pairs = [complex(q[i], q[i + half]) for q in asked]
                middle = sum(pairs) / len(pairs)
                long = math.fsum(map(abs, pairs)) / len(pairs)
                k = complex(key[i], key[i + half])
                phase = cmath.phase(middle * k.conjugate())
                for offset in offsets:
                    far = s.seen - 1 + offset - s.frame[p]
                    total += abs(middle) * abs(k) * math.cos(radians * far + phase) / len(offsets)
                total += (long - abs(middle)) * abs(k)
            total *= scaling**2
            rest = [math.fsum(q[i] for q in asked) / len(asked) for i in range(len(key))]
            score[p] = total + dot(rest[2 * half :], key[2 * half :])
        middle, spread = math.fsum(score.values()) / len(score), deviation([*score.values()], 0)
        for p, x in score.items():
            best[p] = max(best[p], (x - middle) / spread)
    return best


def qfilters(s: Sight, queries: int) -> Scores:
    """By the common direction of the queries, which power iteration finds."""
    total = [0.0] * len(s.keys[0])
    for one in s.group:
        asked = [
            [
                x
                * (s.positions.rotary.scaling if i < 2 * len(s.positions.rotary.frequencies) else 1)
                for i, x in enumerate(s.queries[query][one])
            ]
            for query in s.window(queries)
        ]
        direction = [1.0 + i for i in range(len(total))]
        for _ in range(3000):
            along = [dot(q, direction) for q in asked]
            direction = [
                math.fsum(a * q[i] for a, q in zip(along, asked, strict=True))
                for i in range(len(total))
            ]
            size = length(direction)
            direction = [x / size for x in direction]
        if math.fsum(dot(q, direction) for q in asked) < 0:
            direction = [-x for x in direction]
        for i, x in enumerate(direction):
            total[i] += x / len(s.group)
    half = len(s.positions.rotary.frequencies)
    turned = rotated(total, s.seen, s.positions)
    scaling = s.positions.rotary.scaling
    turned = [x / scaling if i < 2 * half else x for i, x in enumerate(turned)]
    return {p: dot(s.key(p), turned) for p in s.mine}


def ladder(
    tokens: list[int], n: int, rung: int, keep: int, of: int, offset: int
) -> tuple[list[int], int]:
    """Thin out one group after the other, from `rung` on, until at most `n` tokens are left."""
    left = list(tokens)
    while len(left) > n:
        if len(left) - rung < of:
            rung = 0
        group = left[rung : rung + of]
        left[rung : rung + of] = group[offset : offset + keep]
        rung += keep
    return left, rung


def spans(score: Scores, n: int, size: int) -> list[int]:
    """The tokens of the best spans; of the first span that does not fit, the best tokens."""
    members: dict[int, list[int]] = {}
    for p in score:
        members.setdefault(p // size, []).append(p)
    average = {
        span: math.fsum(score[p] for p in tokens) / len(tokens) for span, tokens in members.items()
    }
    kept: list[int] = []
    for span in sorted(members, key=lambda span: (-average[span], span)):
        best = sorted(members[span], key=lambda p: (-score[p], p))
        kept += best[: n - len(kept)]
    return sorted(kept)
