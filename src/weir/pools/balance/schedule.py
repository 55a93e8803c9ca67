"""The schedule of merge-and-reduce over an endless stream: when each level is halved.

BalanceKV (Kochetkova et al. 2025), section 3.2 and Algorithm 4: tokens enter level 0. A block of a
level is halved into the next one, where every token represents twice as many. The paper's levels
grow in number with the stream; here they share a fixed number of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Self

LEVELS = 64
"""More levels than the logarithm of the length of any stream.

With few slots, single tokens may rise up to the highest level. The tokens that stay when this level
is halved remain in it.
"""
NO_BUCKET = -(2**30)
"""Stands for no bucket: for values of length zero, and for tokens of the denominator."""


@lru_cache(maxsize=1024)
def thresholds(slots: int, block: int, levels: int) -> tuple[int, ...]:
    """Compute the number of tokens at which each level may be halved, level 0 first.

    It is a whole block for every level, as in the paper, as long as such levels fit. Otherwise the
    number decreases from each level to the one below, by the largest ratio (in steps of a 64th)
    that fits, but is at least 2.
    """
    block = max(2, min(block, slots // 2 // 2 * 2))
    each = [block] * levels
    for steps in range(63, -1, -1):
        if sum(each) - levels <= slots:
            break
        each = [max(2, int(block * (steps / 64) ** down) // 2 * 2) for down in range(levels)]
    return tuple(reversed(each))


@dataclass
class Group:
    """The levels of one merge-and-reduce.

    Attributes:
        sizes: tokens of each level now, level 0 first.
        halved: for each level, the sizes of the blocks that were halved, in order. The last token
            of an odd block rises alone and unchanged.
    """

    sizes: list[int] = field(default_factory=lambda: [0] * LEVELS)
    halved: list[list[int]] = field(default_factory=lambda: [[] for _ in range(LEVELS)])

    @property
    def levels(self) -> int:
        """The number of levels in use."""
        return max((level for level, size in enumerate(self.sizes) if size), default=-1) + 1

    def halve(self, level: int, block: int) -> None:
        """Halve the oldest tokens of a level, an even number up to a block, or let one rise.

        The remaining tokens of a block of the highest level stay in that level, as its oldest.
        """
        size = min(block, max(1, self.sizes[level] // 2 * 2))
        self.halved[level].append(size)
        self.sizes[level] -= size
        self.sizes[min(level + 1, LEVELS - 1)] += (size + 1) // 2


def make_room(groups: Sequence[Group], slots: int, block: int, eager: bool = False) -> None:
    """Halve blocks until everything fits, beginning with the oldest tokens of the lightest level
    that can be halved.

    This goes on while there are more tokens than slots or, with `eager`, while any level has
    reached its threshold. Each step halves at most one block of the lowest level that has reached
    its threshold. Several groups share the slots evenly, and the first group with such a level is
    halved. If no level has reached its threshold, the lowest level with tokens is halved as far as
    possible. In the highest level a single token is left alone, because it could not rise.
    """
    used = [group for group in groups if group.levels]
    while (crowded := sum(sum(group.sizes) for group in used) > slots) or eager:
        levels = max((group.levels for group in used), default=0)
        enough = thresholds(slots // max(1, len(used)), block, levels)
        found = _first(used, enough)
        if found is None and crowded:
            found = _first(used, (1,) * min(levels, LEVELS - 1) + (2,))
        if found is None:
            return
        group, level = found
        group.halve(level, block)


def _first(groups: list[Group], enough: tuple[int, ...]) -> tuple[Group, int] | None:
    """Find the lowest level that has enough tokens in any group. Returns the first group in which
    it has enough, and the level; None if there is none.
    """
    for level, at_least in enumerate(enough):
        for group in groups:
            if group.sizes[level] >= at_least:
                return group, level
    return None


@lru_cache(maxsize=4096)
def schedule(
    slots: int, block: int, eager: bool, held: tuple[int, ...], arrivals: int
) -> tuple[tuple[int, ...], ...]:
    """Return the halvings (`Group.halved`) that arrivals cause, as if each made room for itself.

    `held` are the numbers of tokens in each level before the arrivals, level 0 first. Other
    arguments are as in `make_room`.
    """
    group = Group([*held, *[0] * (LEVELS - len(held))])
    while arrivals:
        # Nothing can happen until there is one token too many, or level 0 has its threshold.
        step = slots + 1 - sum(group.sizes)
        if eager:
            enough = thresholds(slots, block, max(1, group.levels))[0]
            step = min(step, max(1, enough - group.sizes[0]))
        step = min(step, arrivals)
        group.sizes[0] += step
        arrivals -= step
        make_room([group], slots, block, eager)
    return tuple(map(tuple, group.halved))


@lru_cache(maxsize=4096)
def at_once(slots: int, block: int, tokens: int) -> tuple[tuple[int, ...], ...]:
    """Return the halvings (`Group.halved`) that fit a prompt of `tokens` into the slots (Appendix
    B).

    All blocks are halved in each round. In the last round, only as many of the oldest tokens as
    necessary are. If little is compressed, this is the form of Table 5: twice the excess is halved,
    and the rest stays exact.
    """
    group = Group([tokens, *[0] * (LEVELS - 1)])
    for level in range(LEVELS):
        excess = sum(group.sizes) - slots
        left = min(2 * excess, group.sizes[level] // 2 * 2)
        while left > 0:
            size = min(block, left)
            group.halve(level, size)
            left -= size
    # Odd tokens remain, one per level, which may be too many for few slots.
    make_room([group], slots, block)
    return tuple(map(tuple, group.halved))


@dataclass
class Head:
    """The levels of one head with separate sets: BalanceKV's Algorithm 1, as published.

    Every token enters two merge-and-reduces, so it takes two slots. One merge-and-reduce is for the
    denominator, where all values count as 1. The other is for the numerator. There is one of the
    second kind for each bucket, the tokens whose values have lengths from 2^(i-1) to 2^i.

    Attributes:
        slots, block, eager: as in `make_room`.
        groups: the levels of the denominator, and then those of each bucket of the numerator.
        open: for each bucket in use, the number of its group in `groups`.
        tokens: the number of each token's group; -1 where there is no token, or for one that was
            erased.
    """

    slots: int
    block: int
    eager: bool
    groups: list[Group] = field(default_factory=lambda: [Group()])
    open: dict[int, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)

    def hold(self, number: int, level: int) -> None:
        """Count a token of a level in the bucket `number`, or in the denominator if that is
        `NO_BUCKET`. The level -1 means that there is no token.
        """
        if level >= 0 and number != NO_BUCKET and number not in self.open:
            free = set(range(1, len(self.groups) + 1)) - set(self.open.values())
            self.open[number] = min(free)
            if self.open[number] == len(self.groups):
                self.groups.append(Group())
        group = self.open.get(number, 0) if level >= 0 else -1
        self.tokens.append(group)
        if group >= 0:
            self.groups[group].sizes[level] += 1

    def make_room(self, short: float) -> None:
        """Erase buckets of values up to `short` if there is no room, and then halve.

        The last token of a group cannot be halved away. So if there are more groups than slots, the
        groups of the shortest values are erased, too.
        """
        if sum(sum(group.sizes) for group in self.groups) > self.slots:
            for number in [number for number in self.open if 2.0**number <= short]:
                self._erase(number)
            while sum(group.levels > 0 for group in self.groups) > self.slots:
                self._erase(min(self.open))
        longest = [self.groups[self.open[number]] for number in sorted(self.open, reverse=True)]
        make_room([self.groups[0], *longest], self.slots, self.block, self.eager)

    def _erase(self, number: int) -> None:
        """Evict all tokens of a bucket."""
        gone = self.open.pop(number)
        self.groups[gone] = Group()
        self.tokens = [-1 if group == gone else group for group in self.tokens]

    def padded(self, groups: int) -> list[Group]:
        """Return its groups, padded with empty groups to this number."""
        return [*self.groups, *(Group() for _ in range(groups - len(self.groups)))]

    def buckets(self, groups: int) -> list[int]:
        """Return the bucket of each group, padded to this number of groups; `NO_BUCKET` for the
        denominator and for groups without a bucket.
        """
        numbers = {group: number for number, group in self.open.items()}
        return [numbers.get(group, NO_BUCKET) for group in range(groups)]

    @classmethod
    def admit(
        cls,
        slots: int,
        block: int,
        eager: bool,
        numbers: Sequence[int],
        levels: Sequence[int],
        short: Sequence[float],
    ) -> Self:
        """Let tokens in, by lines 4 to 15 of Algorithm 1.

        Args:
            slots, block, eager: as in `make_room`.
            numbers: the bucket of each token. Arrivals come last, two for each: the token of the
                denominator, and that of the numerator.
            levels: the level of each token; -1 for none.
            short: for each arrival, the length up to which values may be erased.
        """
        head = cls(slots, block, eager)
        known = len(numbers) - 2 * len(short)
        for place, (number, level) in enumerate(zip(numbers, levels, strict=True)):
            head.hold(number, level)
            arrival, second = divmod(place - known, 2)
            if arrival >= 0 and second:
                head.make_room(short[arrival])
        return head
