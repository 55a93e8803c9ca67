"""Numerator and denominator in sets of their own: BalanceKV's Algorithm 1, to the letter.

Every token enters a merge-and-reduce for the denominator, where all values count as 1, and one for
the numerator, in the bucket of values about as long as its own, 2^(i-1) to 2^i: so a token takes
two slots. When there is no room, buckets whose values are so short that they make no difference are
erased, and those of the shortest values where there are more buckets than slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from weir.pools.balance.schedule import Group, make_room
from weir.slab import EMPTY, Slots

NO_BUCKET = -(2**30)
"""In place of a bucket: a value of zero is in none."""
MOST_BUCKET = 1000
"""Buckets run from less this to this: whatever float32 and bfloat16 can say, and more."""


def doubled(new: Slots) -> Slots:
    """Every token twice, side by side: for the denominator alone, and for the numerator alone.

    Empty where a token adds nothing: a value of zero, or no weight.
    """
    nothing = torch.full_like(new.a, -torch.inf)
    below = replace(new, a=nothing, position=new.position.masked_fill(new.b.isneginf(), EMPTY))
    silent = new.a.isneginf() | (bucket(new.values) == NO_BUCKET)
    above = replace(
        new,
        a=new.a.masked_fill(silent, -torch.inf),
        b=nothing,
        position=new.position.masked_fill(silent, EMPTY),
    )
    order = torch.arange(2 * len(new), device=nothing.device).view(2, -1).T.flatten()
    return below.join(above).take_sorted(order.expand(*nothing.shape[:2], -1))


def bucket(values: Tensor) -> Tensor:
    """The i with 2^(i-1) < ‖v‖ <= 2^i for values [..., value_dim], int64."""
    length = values.double().norm(dim=-1)
    mantissa, exponent = torch.frexp(length)
    return torch.where(length > 0, exponent - (mantissa == 0.5).long(), NO_BUCKET).long()


@dataclass
class Head:
    """The levels of one head while tokens come in, and which of them each token is in.

    Attributes:
        slots, block, eager: as in `schedule.make_room`.
        groups: the levels of the denominator, and then those of each bucket of the numerator.
        open: the group of each bucket that is in use.
        tokens: the group of each token so far; -1 for one that was erased.
    """

    slots: int
    block: int
    eager: bool
    groups: list[Group] = field(default_factory=lambda: [Group()])
    open: dict[int, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)

    def hold(self, number: int, level: int) -> None:
        """Count a token of a level, or none (-1), of the bucket `number` or the denominator."""
        group = self._group(number) if level >= 0 else -1
        self.tokens.append(group)
        if group >= 0:
            self.groups[group].sizes[level] += 1

    def make_room(self, short: float) -> None:
        """Erase buckets of values up to `short`, if there is no room, and then halve.

        The last token of a group cannot be halved away, so where there are more groups than slots,
        those of the shortest values are erased too.
        """
        if sum(sum(group.sizes) for group in self.groups) > self.slots:
            for number in [number for number in self.open if 2.0**number <= short]:
                self._erase(number)
            while sum(group.levels > 0 for group in self.groups) > self.slots:
                self._erase(min(self.open))
        longest = [self.groups[self.open[number]] for number in sorted(self.open, reverse=True)]
        make_room([self.groups[0], *longest], self.slots, self.block, self.eager)

    def _erase(self, number: int) -> None:
        """Let go of all tokens of a bucket."""
        gone = self.open.pop(number)
        self.groups[gone] = Group()
        self.tokens = [-1 if group == gone else group for group in self.tokens]

    def padded(self, groups: int) -> list[Group]:
        """Its groups, and as many without tokens as it takes to make so many."""
        return [*self.groups, *(Group() for _ in range(groups - len(self.groups)))]

    def buckets(self, groups: int) -> list[int]:
        """The bucket of each group, of so many; `NO_BUCKET` for the denominator and for none."""
        numbers = {group: number for number, group in self.open.items()}
        return [numbers.get(group, NO_BUCKET) for group in range(groups)]

    def _group(self, number: int) -> int:
        if number == NO_BUCKET:
            return 0
        if number not in self.open:
            free = set(range(1, len(self.groups) + 1)) - set(self.open.values())
            self.open[number] = min(free)
            if self.open[number] == len(self.groups):
                self.groups.append(Group())
        return self.open[number]


def admit(
    head: Head, numbers: Sequence[int], levels: Sequence[int], short: Sequence[float]
) -> Head:
    """Let tokens in, given their buckets and levels; the last ones, two by two, are arrivals.

    Lines 4 to 15 of Algorithm 1; of each arrival `short` is the length of values that may be
    erased. Returns the head.
    """
    known = len(numbers) - 2 * len(short)
    for place in range(known):
        head.hold(numbers[place], levels[place])
    for at, length in enumerate(short):
        for place in (known + 2 * at, known + 2 * at + 1):
            head.hold(numbers[place], levels[place])
        head.make_room(length)
    return head
