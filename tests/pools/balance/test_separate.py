"""Separate sets for ranges of values' lengths, when there are as many ranges as slots, or more."""

from __future__ import annotations

import pytest
import torch

from weir.pools import Balance, Fold
from weir.pools.balance.schedule import LEVELS, NO_BUCKET, Group, Head, make_room
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams, Slots

MOST = 100_000
"""More halvings than any test here needs. Only an endless loop reaches this number."""


@pytest.fixture(autouse=True)
def bounded(monkeypatch):
    """Count halvings, and fail if there are too many, instead of looping forever."""
    halve, calls = Group.halve, []

    def counted(self, level, block):
        calls.append(level)
        assert len(calls) < MOST, "it halves for ever"
        halve(self, level, block)

    monkeypatch.setattr(Group, "halve", counted)
    return calls


def arrivals(*numbers):
    """Return the buckets of tokens that arrive, each after NO_BUCKET, which stands for the token's
    place in the denominator.
    """
    return [number for bucket in numbers for number in (NO_BUCKET, bucket)]


@pytest.mark.parametrize("eager", [False, True])
def test_more_ranges_than_slots_lose_the_shortest_values(bounded, eager):
    numbers = arrivals(3, -2, 5, 1, 0)
    head = Head.admit(4, 2, eager, numbers, [0] * 10, [0.0] * 5)
    assert bounded
    assert sorted(head.open) == [1, 3, 5]
    kept = [bucket for bucket, group in zip(numbers, head.tokens, strict=True) if group >= 0]
    assert kept == [NO_BUCKET, 3, NO_BUCKET, NO_BUCKET, 5, NO_BUCKET, 1, NO_BUCKET]
    assert sum(sum(group.sizes) for group in head.groups) == 4


def test_as_many_ranges_as_slots_are_all_kept(bounded):
    head = Head.admit(4, 2, False, arrivals(3, 5, 1, 3, 5, 1), [0] * 12, [0.0] * 6)
    assert bounded
    assert sorted(head.open) == [1, 3, 5]
    assert -1 not in head.tokens


def test_a_stream_of_values_of_every_size_keeps_its_slots_and_the_longest_values():
    pool = Balance(4, sets="separate", precision=0.0)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 40, 3, generator=generator)
    sizes = 4.0 ** (torch.arange(40) * 7 % 10)
    values = torch.randn(1, 1, 40, 2, generator=generator).sign() * sizes[:, None]
    place = torch.arange(40).view(1, 1, -1)
    zeros = torch.zeros(1, 1, 40)
    whole = Slots(keys, values, zeros, zeros, place)
    held = whole.part(0, 0)
    fold = Fold(CounterRNG(0), torch.tensor([0]), AttentionParams(0.5), state=pool.state(held))
    for start in range(0, 40, 5):
        held, _ = pool.fold(held, whole.part(start, start + 5), fold)
        assert len(held) <= 4
        assert pool.wrong_state(fold.state, len(held), start + 5) is None
    above = ~held.a.isneginf()
    assert int((~held.b.isneginf()).sum()) == 1
    assert sorted(sizes[held.position[above]].tolist()) == [4.0**7, 4.0**8, 4.0**9]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.slow
def test_as_many_sets_as_slots_go_on_for_ever(bounded, eager):
    head = Head.admit(4, 2, eager, arrivals(*[5, 3, 1] * 99), [0] * 594, [0.0] * 297)
    assert LEVELS - 1 in bounded
    assert sorted(head.open) == [1, 3, 5]
    assert [sum(group.sizes) for group in head.groups] == [1, 1, 1, 1]


def test_a_few_slots_remember_levels_that_a_restored_stream_may_have():
    pool, group, highest = Balance(4), Group(), 0
    for came in range(1, 2001):
        group.sizes[0] += 1
        make_room([group], 4, 2)
        highest = max(highest, group.levels - 1)
        state = {"level": torch.tensor([[[highest, -1, -1, -1]]])}
        assert pool.wrong_state(state, 1, came) is None
    assert highest > (2000).bit_length() + 1
