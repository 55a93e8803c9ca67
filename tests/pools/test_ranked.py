"""Pools derived from `Ranked`: only the scores, and the age of equal ones, decide what stays."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from streams import places, tokens
from torch import Tensor

from weir.errors import WeirError
from weir.pools import CounterRNG, Fold, Ranked, Tallied, select_highest
from weir.slab import AttentionParams, Slots

FOLD = Fold(CounterRNG(0), torch.tensor([0]), AttentionParams(1.0))


@dataclass(frozen=True)
class Told(Ranked):
    """A pool with given scores, by place in the stream."""

    name: ClassVar[str] = "told"

    n: int
    scores: tuple[tuple[float, ...], ...]

    def score(self, slots: Slots, fold: Fold) -> tuple[Tensor, ...]:
        return tuple(torch.tensor(each)[slots.position] for each in self.scores)


@dataclass(frozen=True)
class PlaceTally(Tallied):
    """Remembers the place of each token, and finds it again."""

    name: ClassVar[str] = "place_tally"

    n: int

    def tally(self, slots: Slots, before: Tensor, fold: Fold) -> Tensor:
        place = slots.position.float() + 1
        assert torch.equal(before[before > 0], place[before > 0])
        # The test says in `header` how many tokens were held.
        assert int((before > 0).sum()) == fold.header
        return place


@dataclass(frozen=True)
class Counting(Tallied):
    """Counts how often it has computed scores, in an additional tensor of its state."""

    name: ClassVar[str] = "counting"

    n: int

    def state(self, like: Slots) -> dict[str, Tensor]:
        return {**super().state(like), "scored": like.a.new_zeros(1, 1)}

    def tally(self, slots: Slots, before: Tensor, fold: Fold) -> Tensor:
        return slots.position.float()

    def score(self, slots: Slots, fold: Fold) -> Tensor:
        fold.state["scored"] = fold.state["scored"] + 1
        return fold.state["tally"]


def slots_of(position: list[int]) -> Slots:
    """One row, one head."""
    return tokens(torch.tensor(position, dtype=torch.int64)[None, None])


SCORES = st.sampled_from([-math.inf, -1.0, 0.0, 0.5, math.inf])


@given(st.data())
def test_the_highest_scores_stay_then_the_next_ones_then_the_oldest(data):
    n, count = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 14))
    scores = tuple(
        tuple(data.draw(st.lists(SCORES, min_size=count, max_size=count)))
        for _ in range(data.draw(st.integers(1, 3)))
    )
    order = data.draw(st.permutations(range(count)))
    position = [place if data.draw(st.booleans()) else -1 for place in order]
    cut = data.draw(st.integers(0, count))
    held, new = slots_of(sorted(position[:cut])), slots_of(position[cut:])
    pool = Told(n, scores)
    kept, rest = pool.fold(held, new, replace(FOLD, unbroken=False))
    here = sorted(place for place in position if place >= 0)
    wanted = here
    if count > n:
        best = sorted(here, key=lambda place: (*(-each[place] for each in scores), place))
        wanted = sorted(place for place in best[:n] if scores[0][place] > -math.inf)
    assert places(kept) == [wanted]
    assert places(rest) == [sorted(set(here) - set(wanted))]


def test_a_number_goes_with_its_token_however_tokens_arrive():
    pool = PlaceTally(4)
    held = slots_of([])
    state = pool.state(held)
    for arrivals in ([5, 2], [9, 4], [7, 1, 8], [0, 3, 6]):
        fold = replace(FOLD, unbroken=False, header=len(held), state=state)
        held, _ = pool.fold(held, slots_of(arrivals), fold)
        state = fold.state
    assert places(held) == [[6, 7, 8, 9]]
    assert state["tally"][0, 0].tolist() == [7.0, 8.0, 9.0, 10.0]


def test_what_a_score_writes_into_the_state_stays_there():
    pool, held = Counting(2), slots_of([])
    fold = replace(FOLD, state=pool.state(held))
    for arrivals in ([0, 1], [2, 3], [4]):  # the first two fit, and nothing is scored
        held, _ = pool.fold(held, slots_of(arrivals), fold)
    assert fold.state["scored"].item() == 2
    assert fold.state["tally"][0, 0].tolist() == [3.0, 4.0]


def test_nothing_is_scored_while_there_is_room():
    pool = Told(5, ())  # a pool that cannot compute a score
    kept, rest = pool.fold(slots_of([0, 1]), slots_of([2, 3, 4]), FOLD)
    assert places(kept) == [[0, 1, 2, 3, 4]]
    assert len(rest) == 0


def test_it_has_as_many_slots_as_its_first_parameter_says_and_at_least_one():
    assert Told(3, ()).slots() == 3
    assert Told(3, ()).resized(7) == Told(7, ())
    with pytest.raises(WeirError, match=r"^told must keep at least 1 token, got 0$"):
        Told(0, ())


def test_of_several_scores_the_first_decides():
    among = torch.ones(1, 1, 4, dtype=torch.bool)
    first, second = torch.tensor([[[1.0, 2.0, 2.0, 0.0]]]), torch.tensor([[[9.0, 3.0, 4.0, 9.0]]])
    assert select_highest(1, among, first, second)[0, 0].tolist() == [False, False, True, False]
    assert select_highest(2, among, second, first)[0, 0].tolist() == [True, False, False, True]
    flat = torch.zeros_like(first)
    assert select_highest(1, among, flat, first, second)[0, 0].tolist() == [
        False,
        False,
        True,
        False,
    ]
    assert select_highest(1, among, flat, second, first)[0, 0].tolist() == [
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize("kinds", [2, 5, 1000])
def test_the_highest_are_those_that_sorting_by_all_scores_puts_first(kinds):
    drawn = torch.Generator().manual_seed(kinds)
    for count in (1, 2, 7, 40):
        scores = [torch.randint(kinds, (2, 3, count), generator=drawn).float() for _ in range(3)]
        scores[0] = scores[0].where(scores[0] > 0, -torch.inf)
        among = torch.rand(2, 3, count, generator=drawn) < 0.8
        lines = [t.flatten(0, 1).tolist() for t in (among, *scores)]
        for n in range(count + 2):
            stay = torch.zeros(6, count, dtype=torch.bool)
            for line, (there, one, two, three) in enumerate(zip(*lines, strict=True)):
                there = [i for i in range(count) if there[i] and one[i] > -torch.inf]
                there.sort(key=lambda i: (-one[i], -two[i], -three[i], i))
                stay[line, there[:n]] = True
            assert torch.equal(select_highest(n, among, *scores), stay.view_as(among))
