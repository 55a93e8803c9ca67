"""Sinks: the first tokens that arrive stay for ever."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weir.errors import WeirError
from weir.pools import Fold, Recent, Sink
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams
from weir.slab.slots import Slots

FOLD = Fold(CounterRNG(0), torch.tensor([0]), AttentionParams(1.0))


def tokens(start: int, stop: int) -> Slots:
    """Exact tokens of one row and two heads at consecutive places; values say which they are."""
    position = torch.arange(start, stop).expand(1, 2, -1)
    zeros = torch.zeros(position.shape)
    values = position[..., None].float()
    return Slots(values, values, zeros, zeros, position)


@given(st.integers(1, 9), st.lists(st.integers(0, 7), max_size=8))
def test_the_first_tokens_stay_and_all_others_flow_on_in_order(n, arrivals):
    pool, held, seen, passed = Sink(n), tokens(0, 0), 0, []
    for count in arrivals:
        held, rest = pool.fold(held, tokens(seen, seen + count), FOLD)
        seen += count
        passed += rest.position[0, 0].tolist()
        assert len(held) <= pool.slots() == n
    assert held.position[0, 1].tolist() == list(range(min(n, seen)))
    assert held.values[0, 1, :, 0].tolist() == list(range(min(n, seen)))
    assert passed == list(range(n, seen))


def test_a_full_sink_gives_back_what_it_holds_untouched():
    held, _ = Sink(2).fold(tokens(0, 0), tokens(0, 3), FOLD)
    again, rest = Sink(2).fold(held, tokens(3, 5), FOLD)
    assert again is held
    assert rest.position[0, 0].tolist() == [3, 4]


def test_the_paper_keeps_four():
    assert Sink().slots() == 4


def test_only_what_comes_first_can_be_kept_as_the_first():
    Sink(4).check(())
    with pytest.raises(WeirError, match="must be the first pool"):
        Sink(4).check((Recent(3),))
