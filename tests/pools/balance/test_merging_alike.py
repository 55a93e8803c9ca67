"""If all lines (one for each head of each row) have the same layout, they are halved without
sorting, with the result that sorting would have given.
"""

from __future__ import annotations

import pytest
import torch

from weir.pools.balance import merge_reduce
from weir.pools.balance.halving import Halving
from weir.pools.balance.merge_reduce import Merging
from weir.pools.balance.schedule import LEVELS
from weir.pools.counter_rng import CounterRNG
from weir.slab import Slots

LEVEL = [3] * 5 + [2] * 6 + [1] * 4 + [0] * 13

HOW = Halving(), CounterRNG(5), 0.3


def line(level: list[int], *, odd_weight: bool = False) -> Slots:
    """Return tokens for two rows of three heads, with the weights that their levels give."""
    n = len(level)
    generator = torch.Generator().manual_seed(n)
    keys, values = (torch.randn(2, 3, n, 8, generator=generator) for _ in range(2))
    weight = (torch.tensor(level) * 0.6931472).expand(2, 3, n).clone()
    if odd_weight:
        weight[:, :, ::5] += 0.5
    position = torch.arange(n).expand(2, 3, n)
    return Slots(keys, values, weight, weight.clone(), position)


def reduced(slots: Slots, level: list[int], sizes: dict[int, tuple[int, ...]]) -> list:
    blocks = [[sizes.get(number, ()) for number in range(LEVELS)]] * 6
    levels = torch.tensor(level).expand(2, 3, -1)
    kept, level_of, group = Merging(slots, levels, *HOW).reduce(blocks)
    return [*kept.tensors().values(), level_of, group]


@pytest.mark.parametrize(
    "sizes",
    [
        {0: (6,)},
        {0: (4, 4, 4)},
        {0: (6, 4, 1), 1: (4,)},  # unequal blocks, and a token alone
        {0: (8,), 1: (8,), 2: (10,), 3: (2,)},  # tokens that rise are halved again
        {3: (4, 1)},
        {},
    ],
)
@pytest.mark.parametrize("odd_weight", [False, True])
def test_lines_alike_are_halved_as_lines_that_differ(monkeypatch, sizes, odd_weight):
    slots = line(LEVEL, odd_weight=odd_weight)
    got = reduced(slots, LEVEL, sizes)
    sorted_once = []
    monkeypatch.setattr(Merging, "_ends", None)
    front = merge_reduce._in_front
    monkeypatch.setattr(
        merge_reduce, "_in_front", lambda used: sorted_once.append(1) or front(used)
    )
    wanted = reduced(slots, LEVEL, sizes)
    assert sorted_once
    assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_lines_alike_are_not_sorted(monkeypatch):
    monkeypatch.setattr(merge_reduce, "_in_front", lambda used: pytest.fail("sorted"))
    reduced(line(LEVEL), LEVEL, {0: (6, 4, 1), 1: (4,)})


@pytest.mark.parametrize("problem", ["a gap", "another level in one head", "levels out of order"])
def test_lines_that_differ_are_not_taken_for_alike(problem):
    slots, levels = line(LEVEL), torch.tensor(LEVEL).expand(2, 3, -1).clone()
    if problem == "a gap":
        slots.position = slots.position.clone()
        slots.position[1, 2, 7] = -1
    elif problem == "another level in one head":
        levels[1, 2, 14] = 0
    else:
        levels = levels.flip(2)
    assert Merging(slots, levels, *HOW)._ends is None
    alike = torch.tensor(LEVEL).expand(2, 3, -1)
    assert Merging(line(LEVEL), alike, *HOW)._ends == [28, 15, 11, 5]
