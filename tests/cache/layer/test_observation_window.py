"""The attention that slots receive is added up at folds, for all queries of the tail at once."""

from __future__ import annotations

import pytest
import torch
from roundings import close_runs

import weir
from weir.cache.layer import fold
from weir.pools import observed_attention

pytestmark = pytest.mark.thinned(3, least=2)


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("prefill", ["chunked", "full"])
def test_the_sums_do_not_depend_on_how_many_logits_are_held_at_once(
    llama, ids, monkeypatch, chunk, prefill
):
    def masses(at_once: int) -> torch.Tensor:
        monkeypatch.setattr(fold, "AT_ONCE", at_once)
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
    # The fold adds the attention of eight queries in two query heads, which is 1 for each query.
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


@pytest.mark.parametrize("policy", ["recent(6) | heavy(7)", "snap(12, 4, 3)"])
def test_a_prompt_of_whole_tails_is_read_once(llama, ids, monkeypatch, policy):
    """Shares that attention has computed for a whole tail are not computed again at the fold."""
    tokens = ids(2, 48)
    calls: list[str] = []

    def told(sizes: list[int]) -> weir.slab.Slots:
        calls.clear()
        cache = weir.StreamingCache(llama, policy, chunk=8)
        with torch.no_grad():
            for part in tokens.split(sizes, dim=1):
                llama(part, past_key_values=cache)
        return cache.slots(1)

    for module, name in ((fold, "mass_from_tail"), (observed_attention, "compute_logits")):
        monkeypatch.setattr(module, name, _counted(getattr(module, name), name, calls))
    at_once = told([48])
    # Of the last tail, each slot's sum (mass) is kept, but not the shares that `snap` needs.
    layers = llama.config.num_hidden_layers
    assert calls == ([] if at_once.mass is not None else ["compute_logits"] * layers)
    by_parts = told([6] * 8)
    assert len(calls) > 2 * layers
    assert torch.equal(at_once.position, by_parts.position)
    close_runs(at_once.keys, by_parts.keys, llama)
    if at_once.mass is not None:
        close_runs(at_once.mass, by_parts.mass, llama)


def _counted(function, name: str, calls: list[str]):
    """Wrap a function so that each call adds its name to `calls`."""

    def noting(*given, **named):
        calls.append(name)
        return function(*given, **named)

    return noting


def test_older_queries_that_a_pool_looks_at_are_not_counted_again(llama, ids):
    # No token leaves the first two pools, so the third holds none. All it changes is that older
    # queries are kept.
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


@pytest.mark.parametrize("mass", ["", "heavy(7) | "])
@pytest.mark.parametrize("window", [3, 8, 13])
def test_a_pool_hears_the_last_queries_however_calls_were_cut(
    llama, ids, monkeypatch, window, mass
):
    tokens = ids(2, 41)
    heard: dict[int, list[torch.Tensor]] = {}

    def listening(pool, slots, fold):
        if fold.draws.layer == 1:
            for row, seen in enumerate(fold.seen.tolist()):
                heard.setdefault(seen, []).append(fold.queries[row])
        return slots.position.float()

    monkeypatch.setattr(weir.pools.Snap, "score", listening)

    def told(sizes: list[int], padding: int) -> list[torch.Tensor]:
        """The queries that the pool receives for the last row, at each of its folds."""
        heard.clear()
        cache = weir.StreamingCache(llama, f"recent(16) | {mass}snap(4, {window}, 1)", chunk=8)
        rows = tokens if padding else tokens[1:]
        mask = torch.ones_like(rows)
        mask[: len(rows) - 1, :padding] = 0
        parts, start = rows.split(sizes, dim=1), 0
        with torch.no_grad():
            for part in parts:
                start += part.shape[1]
                llama(part, attention_mask=mask[:, :start], past_key_values=cache)
        assert cache.stack[1].state.slab.queries.shape[2] == max(window, 8 if mass else 0)
        return [heard[seen][-1] for seen in range(32, 41, 8)]

    wanted = told([41], 0)
    assert wanted[0].shape[2] == window
    older = max(0, window - 8)
    assert torch.equal(wanted[1][:, :, :older], wanted[0][:, :, window - older :])
    for sizes, padding in (([3, 8, 1, 1, 17, 11], 0), ([1] * 41, 0), ([20, *[1] * 9, 12], 5)):
        for got, its in zip(told(sizes, padding), wanted, strict=True):
            close_runs(got, its, llama)
