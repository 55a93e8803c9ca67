"""LaCache's ladder: older tokens are thinned group by group, and layers drop different ones."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pools.streams import places, tokens
from reference.scores import ladder

import weir
from weir.errors import WeirError
from weir.pools import CounterRNG, Fold, Ladder
from weir.slab import AttentionParams

FOLD = Fold(CounterRNG(0), torch.tensor([0]), AttentionParams(1.0))


def arrivals(start: int, count: int, rows: int = 1):
    return tokens(torch.arange(start, start + count).expand(rows, 2, -1))


@given(st.data())
def test_groups_are_thinned_one_after_the_other_from_the_oldest_on(data):
    of = data.draw(st.integers(2, 6))
    keep, layer = data.draw(st.integers(1, of - 1)), data.draw(st.integers(0, 9))
    pool = Ladder(data.draw(st.integers(of, 20)), keep, of)
    sizes = data.draw(st.lists(st.integers(0, 25), max_size=9))
    held, left, rung = arrivals(0, 0), [], 0
    state, seen = pool.state(held), 0
    for size in sizes:
        fold = replace(FOLD, draws=CounterRNG(0, layer), state=state)
        held, gone = pool.fold(held, arrivals(seen, size), fold)
        state = fold.state
        before = [*left, *range(seen, seen + size)]
        left, rung = ladder(before, pool.n, rung, keep, of, layer % (of - keep + 1))
        assert places(held) == [left] * 2
        assert places(gone) == [sorted(set(before) - set(left))] * 2
        assert state["rung"].tolist() == [[[rung]] * 2]
        seen += size


def test_rows_in_different_rounds_fold_together():
    pool = Ladder(6)
    alone = []
    for rung in (0, 5):
        state = {"rung": torch.full((1, 2, 1), rung)}
        fold = replace(FOLD, state=state)
        kept, _ = pool.fold(arrivals(0, 6), arrivals(6, 3), fold)
        alone.append((places(kept)[0], fold.state["rung"].flatten().tolist()[0]))
    state = {"rung": torch.tensor([[[0]] * 2, [[5]] * 2])}
    fold = replace(FOLD, seen=torch.tensor([9, 9]), state=state)
    kept, _ = pool.fold(arrivals(0, 6, 2), arrivals(6, 3, 2), fold)
    for row, (left, rung) in enumerate(alone):
        assert [p for p in kept.position[row, 0].tolist() if p >= 0] == left
        assert fold.state["rung"][row].flatten().tolist() == [rung] * 2
    assert alone[0] != alone[1]


def test_two_layers_together_hold_all_that_was_thinned_once():
    held = []
    for layer in range(2):
        fold = replace(
            FOLD, draws=CounterRNG(0, layer), state={"rung": torch.zeros(1, 2, 1).long()}
        )
        kept, _ = Ladder(12).fold(arrivals(0, 0), arrivals(0, 20), fold)
        held.append(set(places(kept)[0]))
    assert held[0] | held[1] == set(range(20))
    assert len(held[0] & held[1]) == 4


def test_groups_of_one_are_refused():
    with pytest.raises(WeirError, match="of of ladder must be at least 2, got 1"):
        Ladder(8, 1, 1)


def test_the_older_the_farther_apart(llama, ids):
    stream = weir.Stream(llama, "sink(2) | recent(8) | ladder(24)", chunk=4)
    stream.feed(ids(1, 300))
    held = stream.slots(layer=1)
    there = sorted(p for p in held.position[0, 0].tolist() if p >= 0)
    gaps = [b - a for a, b in itertools.pairwise(there[2:])]
    assert sum(gaps[:8]) > 3 * sum(gaps[8:16]) / 2
    assert gaps[-8:] == [1] * 8
