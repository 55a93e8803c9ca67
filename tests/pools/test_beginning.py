"""The pool `beginning`: a row keeps its first tokens, as many as its marks say and at most n."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sink import FOLD, tokens

from weir.errors import WeirError
from weir.pools import Beginning, Recent, Sink


@given(
    st.integers(1, 9),
    st.none() | st.integers(0, 12),
    st.lists(st.integers(0, 7), max_size=8),
)
def test_the_tokens_of_the_beginning_stay_and_all_others_flow_on_in_order(n, told, arrivals):
    pool, held, seen, passed = Beginning(n), tokens(0, 0), 0, []
    for count in arrivals:
        fold = replace(FOLD, beginning=told)
        held, rest = pool.fold(held, tokens(seen, seen + count), fold)
        seen += count
        passed += rest.position[0, 0].tolist()
    most = n if told is None else min(n, told)
    assert held.position[0, 1].tolist() == list(range(min(most, seen)))
    assert passed == list(range(most, seen))


def test_what_is_whole_is_given_back_untouched():
    held = tokens(0, 2)
    again, rest = Beginning(8).fold(held, tokens(2, 5), replace(FOLD, beginning=2))
    assert again is held
    assert rest.position[0, 0].tolist() == [2, 3, 4]


def test_it_stands_first_and_sinks_may_follow():
    Beginning(4).check(())
    Sink(4).check((Beginning(4),))
    for pool in (Beginning(4), Sink(4)):
        with pytest.raises(WeirError, match="must be the first pool"):
            pool.check((Recent(3),))
    with pytest.raises(WeirError, match="must be the first pool"):
        Sink(4).check((Beginning(4), Recent(3)))
