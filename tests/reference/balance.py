"""BalanceKV token by token, from the paper alone: what `balance` is checked against.

Kochetkova et al. 2025, "Streaming Attention Approximation via Discrepancy Theory": Algorithms 1, 2
and 4. Algorithm 4 needs to know the length of the stream. docs/methods/samples.md says how its
levels share a fixed number of slots instead, and `Balance.make_room` implements this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache


@dataclass(frozen=True)
class Token:
    """A token that counts as e^a tokens in the numerator and as e^b tokens in the denominator."""

    position: int
    key: tuple[float, ...]
    value: tuple[float, ...]
    a: float = 0.0
    b: float = 0.0


Place = Token | None
"""A token or an empty place: the half that a block keeps can have fewer tokens than places."""

Coin = Callable[[int, int, int], float]
"""A function (level, position, block) -> uniform number. At the highest level, `block` tells the
blocks apart; at all other levels it is 0.
"""

HIGHEST = 63
"""The highest level. What stays of its blocks stays in this level."""


def dot(x: Iterable[float], y: Iterable[float]) -> float:
    return sum(p * q for p, q in zip(x, y, strict=True))


def close(x: float, y: float) -> bool:
    """Whether two numbers are equal but for rounding, by the bound that weir's `Halving` uses."""
    return x == y or abs(x - y) < 1e-5


@dataclass
class SoftmaxBalance:
    """Algorithm 2 (`paper`), and two rules that keep exactly half (`pairs`, `authors`)."""

    halves: str
    gamma: float | None
    temperature: float
    constant: float
    scale: float
    flat: bool = False

    def __call__(self, places: list[Place], draw: Callable[[Token], float]) -> list[Place]:
        """What stays of a block: half as many places, rounded up."""
        tokens = [t for t in places if t is not None]
        half = (len(places) + 1) // 2
        if len(tokens) < 2:
            stays = tokens
        elif self.halves == "pairs":
            stays = self.pairs(places, draw)
        else:
            numbers = [draw(t) for t in tokens]
            if self.halves == "authors":
                numbers[0] = -math.inf
            signs = self.walk(tokens, [[(t, 1)] for t in tokens], numbers)
            choose = self.authors if self.halves == "authors" else self.paper
            stays = choose(tokens, signs)
        return [*stays, *[None] * (half - len(stays))]

    def walk(
        self, everyone: list[Token], vectors: list[list[tuple[Token, int]]], numbers: list[float]
    ) -> list[int]:
        """The signs of vectors in a block of tokens; a vector is a sum of tokens with signs."""
        tokens = [t for vector in vectors for t, _ in vector]
        mean = [sum(x) / len(everyone) for x in zip(*(t.key for t in everyone), strict=True)]
        most_a, most_b = (max(getattr(t, x) for t in everyone) for x in "ab")
        moved = {t.position: [x - m for x, m in zip(t.key, mean, strict=True)] for t in everyone}

        def weight(of: float, most: float) -> float:
            return math.exp(of - most) if most > -math.inf else 0.0

        def product(t: Token, u: Token) -> float:
            likeness = dot(moved[t.position], moved[u.position])
            kernel = math.exp(self.temperature * self.scale * likeness)
            if self.halves == "authors":
                return kernel * self.released(t, u)
            above = weight(t.a, most_a) * weight(u.a, most_a) * dot(t.value, u.value)
            return kernel * (above + self.constant * weight(t.b, most_b) * weight(u.b, most_b))

        gain = self.gamma
        if gain is None:
            r_key = max(dot(moved[t.position], moved[t.position]) for t in everyone)
            r_value = max(weight(t.a, most_a) ** 2 * dot(t.value, t.value) for t in everyone)
            r_value += self.constant * max(weight(t.b, most_b) for t in everyone) ** 2
            if self.halves == "authors":
                r_value = max(math.exp(t.a) ** 2 * dot(t.value, t.value) for t in everyone)
                r_value += max(self.released(t, t, alone=True) for t in everyone)
            radius = math.exp(self.temperature * self.scale * r_key) * r_value
            n = len(everyone)
            if self.halves == "pairs":
                n, radius = n // 2, 4 * radius
            c = 30 * math.log(max(n, 2) / (1 / max(n, 2)))
            gain = 1 / (2 * c * radius)
        known = {  # products of each token with those before it
            (i, j): product(t, u) for i, t in enumerate(tokens) for j, u in enumerate(tokens[:i])
        }
        numbered = []
        for vector in vectors:
            numbered.append(
                [(len(numbered) * len(vector) + i, s) for i, (_, s) in enumerate(vector)]
            )
        signs: list[int] = []
        for mine, u in zip(numbered, numbers, strict=True):
            total = sum(
                sign * s * r * known[i, j]
                for other, sign in zip(numbered, signs, strict=False)
                for i, s in mine
                for j, r in other
            )
            signs.append(1 if u < 0.5 - gain * total else -1)
        return signs

    def released(self, t: Token, u: Token, alone: bool = False) -> float:
        """The product of two tokens in the authors' code, which scales values by their weights, but
        not the constant.

        If a token is only in the denominator, its weight there scales the constant. With `alone`,
        only the part of the constant is returned.
        """
        values = 0.0 if alone else math.exp(t.a + u.a) * dot(t.value, u.value)
        counts = [math.exp(x.b) if x.a == -math.inf else float(x.b > -math.inf) for x in (t, u)]
        return values + self.constant * counts[0] * counts[1]

    def pairs(self, places: list[Place], draw: Callable[[Token], float]) -> list[Token]:
        """Keep one of each two neighbors, weighted to represent both."""
        couples = [tuple(places[i : i + 2]) for i in range(0, len(places) - 1, 2)]
        alike = [
            c
            for c in couples
            if None not in c and all(close(getattr(c[0], x), getattr(c[1], x)) for x in "ab")
        ]
        apart = [[(one, 1), (other, -1)] for one, other in alike]
        numbers = [draw(one) for one, _ in alike]
        signs = iter(self.walk([t for t in places if t is not None], apart, numbers))
        stays = []
        for couple in couples:
            first, second = couple
            if None in couple:
                stays += [t for t in couple if t is not None]
            elif couple in alike:
                t = first if next(signs) > 0 else second
                stays.append(replace(t, a=t.a + math.log(2), b=t.b + math.log(2)))
            else:
                one, other = (math.exp(max(t.a, t.b)) for t in couple)
                chance = one / (one + other)
                t, chance = (first, chance) if draw(first) < chance else (second, 1 - chance)
                stays.append(replace(t, a=t.a - math.log(chance), b=t.b - math.log(chance)))
        return stays + [t for t in places[len(couples) * 2 :] if t is not None]

    def paper(self, tokens: list[Token], signs: list[int]) -> list[Token]:
        """Lines 12 to 16 of Algorithm 2: the smaller of the two sides stays."""
        plus = [t for t, s in zip(tokens, signs, strict=True) if s > 0]
        minus = [t for t, s in zip(tokens, signs, strict=True) if s < 0]
        fewer = plus if len(plus) <= len(minus) else minus
        return [replace(t, a=t.a + math.log(2), b=t.b + math.log(2)) for t in fewer]

    def authors(self, tokens: list[Token], signs: list[int]) -> list[Token]:
        """The rule of the released code: the side that is the last to collect half of the tokens
        loses these. All others stay, and those from before this moment count twice.
        """
        half = len(tokens) // 2
        seen, reached = {1: 0, -1: 0}, {}
        for step, sign in enumerate(signs):
            seen[sign] += 1
            if seen[sign] == half:
                reached[sign] = step
        side = max(reached, key=lambda sign: reached[sign])
        stays = []
        for step, (t, sign) in enumerate(zip(tokens, signs, strict=True)):
            early = step <= reached[side]
            if not early or sign != side:
                more = math.log(2) if early else 0.0
                below = math.log(2) if early or self.flat else 0.0
                stays.append(replace(t, a=t.a + more, b=t.b + below))
        return stays


@cache
def thresholds(slots: int, block: int, levels: int) -> list[int]:
    """How many tokens a level needs before it can be halved, level 0 first."""
    block = max(2, min(block, slots // 2 - slots // 2 % 2))
    for ratio in (1.0, *(i / 64 for i in range(63, -1, -1))):
        wanted = [block * ratio**down for down in range(levels)]
        even = [max(2, math.floor(x) - math.floor(x) % 2) for x in wanted]
        if sum(x - 1 for x in even) <= slots:
            break
    return even[::-1]


@dataclass
class Tower:
    """The sets C^0, C^1, ... of Algorithm 4."""

    coin: Coin
    sets: list[list[Place]] = field(default_factory=lambda: [[]])

    def count(self) -> int:
        return sum(map(len, self.sets))

    def halve(self, level: int, block: int, balance: SoftmaxBalance) -> None:
        """Line 13 of Algorithm 4, for the oldest block of a level."""
        mine = self.sets[level]
        size = min(block, max(1, len(mine) - len(mine) % 2))
        if level == HIGHEST:
            places = sum(token.position for token in mine[:size] if token is not None)
            stays = balance(mine[:size], lambda token: self.coin(level, token.position, places))
            self.sets[level] = [*stays, *mine[size:]]
            return
        self.sets[level] = mine[size:]
        if level + 1 == len(self.sets):
            self.sets.append([])
        self.sets[level + 1] += balance(
            mine[:size], lambda token: self.coin(level, token.position, 0)
        )


@dataclass
class Balance:
    """One head of one row.

    Attributes:
        n, block, eager: as in the pool.
        balance: how blocks are halved.
        coin: the random numbers of the shared sets or, if the numerator has separate sets, of the
            denominator's.
        above: the random numbers of the numerator's separate sets; None if sets are shared.
        precision: epsilon of Algorithm 1.
        came: how many tokens have arrived.
        longest: the length of the longest value so far.
        erased: how many tokens were erased because their values are short.
    """

    n: int
    block: int
    balance: SoftmaxBalance
    coin: Coin
    above: Coin | None = None
    precision: float = 0.1
    eager: bool = False
    came: int = 0
    longest: float = 0.0
    erased: int = 0

    def __post_init__(self) -> None:
        self.main = Tower(self.coin)
        self.buckets: dict[int, Tower] = {}

    def give_back(self) -> None:
        """After a fold, remove empty places, unless Algorithm 4 is followed to the letter
        (`eager`).
        """
        if not self.eager:
            for tower in self.towers():
                tower.sets = [[t for t in places if t is not None] for places in tower.sets]

    def take(self, token: Token) -> None:
        """One token comes."""
        self.came += 1
        if self.above is None:
            self.main.sets[0].append(token)
        else:
            length = math.sqrt(dot(token.value, token.value))
            self.longest = max(self.longest, length)
            if token.b > -math.inf:
                self.main.sets[0].append(replace(token, a=-math.inf))
            if length > 0 and token.a > -math.inf:
                mantissa, power = math.frexp(length)  # from 1/2 on, below 1
                i = power - (mantissa == 0.5)  # the smallest with length <= 2^i
                tower = self.buckets.setdefault(i, Tower(self.above))
                tower.sets[0].append(replace(token, b=-math.inf))
        if self.count() > self.n:
            least = self.precision / math.sqrt(self.came) * self.longest
            for i in [i for i in self.buckets if 2.0**i <= least]:
                self.erased += self.buckets.pop(i).count()
            while sum(tower.count() > 0 for tower in self.towers()) > self.n:
                self.erased += self.buckets.pop(min(self.buckets)).count()
        self.make_room()

    def take_prompt(self, tokens: list[Token], block: int) -> None:
        """All tokens of a prompt come at once (Appendix B), for one shared set."""
        left: list[Place] = list(tokens)
        for level in range(64):
            total = self.main.count() + len(left)
            even = len(left) - len(left) % 2
            halved = min(even, 2 * max(0, total - self.n))
            self.main.sets[level] += left[halved:]
            blocks = [left[i : min(i + block, halved)] for i in range(0, halved, block)]
            left = []
            for part in blocks:
                left += self.balance(part, lambda token, at=level: self.coin(at, token.position, 0))
            if not left:
                break
            self.main.sets.append([])
        self.came += len(tokens)
        self.make_room()

    def count(self) -> int:
        return sum(tower.count() for tower in self.towers())

    def towers(self) -> list[Tower]:
        """The denominator's tower, and then the numerator's, those of the longest values first."""
        return [self.main, *(self.buckets[i] for i in sorted(self.buckets, reverse=True))]

    def make_room(self) -> None:
        """Halve while there are too many tokens or, if eager, while any level reaches its
        threshold.
        """
        while True:
            crowded = self.count() > self.n
            used = [tower for tower in self.towers() if tower.count()]
            high = max((k + 1 for t in used for k, s in enumerate(t.sets) if s), default=0)
            enough = thresholds(self.n // max(1, len(used)), self.block, high)
            ready = [
                (level, place)
                for place, tower in enumerate(used)
                for level, least in enumerate(enough)
                if level < len(tower.sets) and len(tower.sets[level]) >= least
            ]
            if not ready and crowded:
                ready = [
                    (level, place)
                    for place, tower in enumerate(used)
                    for level, tokens in enumerate(tower.sets)
                    if len(tokens) > (level == HIGHEST)
                ]
            if not ready or not (crowded or self.eager):
                return
            level, place = min(ready)
            used[place].halve(level, self.block, self.balance)

    def holds(self) -> list[Token]:
        """All tokens that stay, by position; at one position, the denominator's token is first."""
        places = [t for tower in self.towers() for tokens in tower.sets for t in tokens]
        return sorted((t for t in places if t is not None), key=lambda t: (t.position, t.a))

    def sizes(self) -> list[int]:
        """Places of each level of the main sets, without the empty levels on top."""
        sizes = [len(tokens) for tokens in self.main.sets]
        while sizes and not sizes[-1]:
            sizes.pop()
        return sizes
