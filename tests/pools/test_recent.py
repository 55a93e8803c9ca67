"""The window: the newest tokens stay."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from weir.pools import Fold, Recent
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams
from weir.slab.slots import Slots

FOLD = Fold(CounterRNG(0), torch.tensor([0]), AttentionParams(1.0))


def tokens(*heads: list[int]) -> Slots:
    """Tokens of one row at the given places by head, -1 for none; values say which they are."""
    position = torch.tensor([heads], dtype=torch.int64)
    weights = torch.zeros(position.shape).masked_fill(position < 0, -torch.inf)
    values = position[..., None].float()
    return Slots(values, values, weights, weights.clone(), position)


@given(st.integers(1, 9), st.lists(st.integers(0, 12), max_size=8))
def test_the_newest_tokens_stay_and_older_ones_flow_on_in_order(n, arrivals):
    pool, held, seen, passed = Recent(n), tokens([]), 0, []
    for count in arrivals:
        held, rest = pool.fold(held, tokens(list(range(seen, seen + count))), FOLD)
        seen += count
        passed += rest.position[0, 0].tolist()
        assert len(held) <= pool.slots() == n
    kept = list(range(max(0, seen - n), seen))
    assert held.position[0, 0].tolist() == held.values[0, 0, :, 0].tolist() == kept
    assert passed == list(range(max(0, seen - n)))


ragged = st.lists(st.integers(0, 40), max_size=6, unique=True)


@given(st.integers(1, 5), st.lists(st.tuples(ragged, ragged), max_size=5))
def test_after_a_pool_that_chooses_it_still_keeps_the_newest_of_each_head(n, arrivals):
    pool, held = Recent(n), tokens([], [])
    everything: list[list[int]] = [[], []]
    for place, heads in enumerate(arrivals):
        heads = [[100 * place + t for t in head] for head in heads]
        width = max(map(len, heads))
        new = tokens(*(head + [-1] * (width - len(head)) for head in heads))
        held, rest = pool.fold(held, new, replace(FOLD, unbroken=False))
        assert len(held) <= n
        for head in range(2):
            everything[head] = sorted(everything[head] + heads[head])
            stay, flow = everything[head][-n:], everything[head][:-n]
            assert [p for p in held.position[0, head].tolist() if p >= 0] == stay
            assert [p for p in rest.position[0, head].tolist() if p >= 0] == flow
            everything[head] = stay
            assert held.a[0, head].isneginf().tolist() == (held.position[0, head] < 0).tolist()


def test_without_a_limit_nothing_flows_on():
    held, rest = Recent(None).fold(tokens([0, 1]), tokens([2, 3]), FOLD)
    assert (held.position[0, 0].tolist(), len(rest)) == ([0, 1, 2, 3], 0)
    assert Recent(None).slots() is None
