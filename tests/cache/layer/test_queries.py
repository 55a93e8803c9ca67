"""Attention received, counted at the fold for all queries of the tail at once."""

from __future__ import annotations

import pytest
import torch
from roundings import close_runs

import weir
from weir.cache.layer import queries as tally


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("prefill", ["chunked", "full"])
def test_the_sums_do_not_depend_on_how_many_logits_are_held_at_once(
    llama, ids, monkeypatch, chunk, prefill
):
    def masses(at_once: int) -> torch.Tensor:
        monkeypatch.setattr(tally, "_AT_ONCE", at_once)
        cache = weir.StreamingCache(llama, "recent(6) | heavy(7)", chunk=chunk, prefill=prefill)
        with torch.no_grad():
            llama(ids(2, 20), past_key_values=cache)
            llama(ids(2, 15, seed=1), past_key_values=cache)
        return cache.slots(1).mass

    whole = masses(1 << 24)
    assert whole.max() > 0.1
    close_runs(masses(1), whole, llama)


def test_nothing_is_counted_between_folds(llama, ids):
    cache = weir.StreamingCache(llama, "recent(6) | heavy(7)", chunk=8)
    with torch.no_grad():
        llama(ids(1, 32), past_key_values=cache)
        before = cache.slots(0).mass
        llama(ids(1, 7, seed=1), past_key_values=cache)
        between = cache.slots(0).mass
        assert torch.equal(between[:, :, : before.shape[2]], before)
        assert between[:, :, before.shape[2] :].eq(0).all()
        llama(ids(1, 1, seed=2), past_key_values=cache)
    # Eight queries of two heads: each spreads one unit of attention over what it sees.
    assert float(cache.slots(0).mass[0, 0].sum()) > float(before[0, 0].sum())


def test_a_batch_that_was_cut_differently_has_the_same_sums(llama, ids):
    tokens = ids(2, 41)
    one, other = (weir.StreamingCache(llama, "recent(6) | heavy(7)", chunk=8) for _ in range(2))
    with torch.no_grad():
        llama(tokens, past_key_values=one)
        for part in tokens.split([3, 8, 1, 1, 17, 11], dim=1):
            llama(part, past_key_values=other)
    mine, theirs = one.slots(1), other.slots(1)
    assert torch.equal(mine.position, theirs.position)
    close_runs(mine.mass, theirs.mass, llama)


def test_older_queries_that_a_pool_looks_at_are_not_counted_again(llama, ids):
    # Nothing leaves the first two pools, so the third changes nothing but what is remembered.
    text = "recent(6) | heavy(40)"
    masses = []
    for policy in (text, f"{text} | snap(9, 4, 3)"):
        cache = weir.StreamingCache(llama, policy, chunk=8)
        with torch.no_grad():
            for seed in range(5):
                llama(ids(1, 8, seed=seed), past_key_values=cache)
        masses.append(cache.slots(1).mass[:, :, :40])
    assert masses[0].min() > 0
    close_runs(masses[1], masses[0], llama)
