"""Uniform sampling: so many tokens of all that came, or a share of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.uniform import by_budget, by_rate, log_weight
from roundings import close, largest
from sampling import ManySeeds, arrivals, bias, folds, sums, unevenness, z_of_chi_square
from streams import Row, Streams, tokens

import weir
from weir.policies.grammar import policy
from weir.policies.pipe import Pipe
from weir.pools import Fold, Heavy, Recent, Sink, Uniform
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams
from weir.slab.slots import Slots


def draws_of(head: int, pool: int, places: int):
    """A function from a token to its number in one head."""
    place = torch.arange(places).expand(1, head + 1, -1)
    return CounterRNG(0, 0, pool).uniform(0, place)[0, head].tolist().__getitem__


# --- against the book


@pytest.mark.parametrize(("chunk", "length"), [(1, 200), (7, 600), (64, 1000)])
@pytest.mark.parametrize(("weighted", "per_head"), [(False, True), (True, False)])
def test_it_holds_what_a_shuffle_of_all_that_came_puts_first(chunk, length, weighted, per_head):
    pipe = Pipe((Sink(3), Recent(6), Uniform(10, weighted=weighted, per_head=per_head)))
    draws = [draws_of(head if per_head else 0, 2, length) for head in range(2)]

    def watch(index: int, row: Row) -> None:
        kept, middle = row.held[2], range(3, max(3, row.seen - 6))
        came = tokens(kept.position)
        assert torch.equal(kept.keys, came.keys)
        factor = log_weight(len(middle), 10) if weighted else 0.0
        for head in range(2):
            assert kept.position[0, head].tolist() == by_budget(middle, 10, draws[head])
            for now, then in ((kept.a, came.a), (kept.b, came.b)):
                close(now[0, head], then[0, head] + factor, size=factor + largest(then))

    Streams(pipe, chunk, (0, 3, 11), watch=watch).run(length)


@pytest.mark.parametrize("cuts", [[3, 4, 4, 30, 200], [200], list(range(1, 201))])
@pytest.mark.parametrize("weighted", [False, True])
def test_by_rate_it_holds_those_whose_coin_shows_heads(cuts, weighted):
    pool, held, start = Uniform(rate=0.3, weighted=weighted), tokens(torch.empty(1, 2, 0).long()), 0
    gone: list[list[int]] = [[], []]
    for stop in cuts:
        new = tokens(torch.arange(start, stop).expand(1, 2, -1))
        fold = Fold(
            CounterRNG(0), torch.tensor([stop]), AttentionParams(1.0), state=pool.state(held)
        )
        held, rest = pool.fold(held, new, fold)
        start = stop
        for head in range(2):
            gone[head] += rest.position[0, head][rest.held[0, head]].tolist()
    widest = 0
    for head in range(2):
        here = held.held[0, head]
        came = tokens(held.position[:, head : head + 1, here])
        wanted = by_rate(range(200), 0.3, draws_of(head, 0, 200))
        assert held.position[0, head][here].tolist() == wanted
        factor = -math.log(0.3) if weighted else 0.0
        close(held.a[0, head][here], came.a[0, 0] + factor, size=factor + largest(came.a))
        close(held.b[0, head][here], came.b[0, 0] + factor, size=factor + largest(came.b))
        assert sorted(gone[head] + wanted) == (wanted if weighted else list(range(200)))
        widest = max(widest, len(wanted))
    assert len(held) == widest


# --- the distribution

SEEDS, SAMPLES, MIDDLE = 4000, 8, 56


@pytest.fixture(scope="module")
def seeds() -> ManySeeds:
    """Four thousand of them."""
    return ManySeeds.of(SEEDS, MIDDLE)


@pytest.mark.parametrize("cuts", [list(range(1, MIDDLE + 1)), [3, 5, 20, 21, 56], [MIDDLE]])
def test_at_every_step_every_token_that_came_is_equally_likely_to_be_there(seeds, cuts):
    for came, kept in folds(Uniform(SAMPLES), seeds, cuts):
        counts = kept.position[kept.held].bincount(minlength=came)
        assert int(counts.sum()) == SEEDS * min(came, SAMPLES)
        if came <= SAMPLES:
            assert counts.eq(SEEDS).all()
        else:
            assert unevenness(counts, SEEDS, SAMPLES) < 5, came


def test_sampling_again_from_what_is_held_would_be_something_else(seeds):
    # New numbers at every fold for all that is there: tokens grow rarer with age.
    held = arrivals(0, 0, SEEDS)
    for came in range(1, 21):
        draws = ManySeeds(seeds.table.roll(came, dims=1))
        fold = Fold(draws, torch.tensor([came]), AttentionParams(1.0))
        held, _ = Uniform(SAMPLES).fold(held, arrivals(came - 1, came, SEEDS), fold)
    assert unevenness(held.position.flatten().bincount(minlength=20), SEEDS, SAMPLES) > 10


def test_by_rate_every_token_is_kept_with_that_probability_and_for_itself(seeds):
    *_, (_, kept) = folds(Uniform(rate=0.25), seeds, list(range(7, MIDDLE + 1, 7)))
    counts = kept.position[kept.held].bincount(minlength=MIDDLE)
    chi = ((counts - SEEDS * 0.25) ** 2).sum().item() / (SEEDS * 0.25 * 0.75)
    assert z_of_chi_square(chi, MIDDLE) < 5
    sizes = kept.held.sum(dim=2).double()[0]
    # A binomial's variance; were tokens kept in company, sizes would spread more.
    variance = MIDDLE * 0.25 * 0.75
    assert abs(float(sizes.var()) - variance) < 5 * variance * math.sqrt(2 / SEEDS)


def test_every_pair_of_tokens_is_equally_likely_to_be_there_together(seeds):
    *_, (_, kept) = folds(Uniform(2), seeds, list(range(1, 8)))
    found = Counter(tuple(sorted(pair)) for pair in kept.position[0].tolist())
    share = SEEDS / len(list(combinations(range(7), 2)))
    chi = sum((count - share) ** 2 / share for count in found.values())
    assert len(found) == 21
    assert z_of_chi_square(chi, 20) < 5


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 12), st.booleans())
def test_it_makes_no_difference_how_arrivals_are_cut(steps, samples, weighted):
    draws = ManySeeds.of(3, sum(steps) + 1)
    cuts = [sum(steps[: i + 1]) for i in range(len(steps))]
    for pool in (Uniform(samples, weighted=weighted), Uniform(rate=0.4, weighted=weighted)):
        *_, (_, pieces) = folds(pool, draws, cuts)
        *_, (_, at_once) = folds(pool, draws, [sum(steps)])
        for name, t in pieces.tensors().items():
            if name in ("position", "a", "b"):
                assert torch.equal(t, at_once.tensors()[name])


# --- weights

KEYS = torch.randn(24, 3, generator=torch.Generator().manual_seed(3)) * 0.5
QUERIES = torch.randn(4, 3, generator=torch.Generator().manual_seed(4))


def worst_bias(kept: Slots, came: int) -> float:
    """Over the queries and both sums, in standard deviations."""
    exact = [sums(arrivals(0, came, 1, KEYS), query)[0] for query in QUERIES]
    return max(bias(sums(kept, q), wanted) for q, wanted in zip(QUERIES, exact, strict=True))


@pytest.mark.parametrize("pool", [Uniform(8, weighted=True), Uniform(rate=1 / 3, weighted=True)])
def test_weighted_both_sums_are_unbiased_whenever_it_folds(seeds, pool):
    for came, kept in folds(pool, seeds, [9, 16, 24], KEYS):
        assert worst_bias(kept, came) < 5


@pytest.mark.parametrize("pool", [Uniform(8, weighted=True), Uniform(rate=1 / 3, weighted=True)])
def test_other_weights_would_be_biased(seeds, pool):
    # The right sample with the plain weights, and with weights that are six per cent off.
    *_, (_, kept) = folds(pool, seeds, [24], KEYS)
    for wrong in (1 / 3, 0.94, 1.06):
        off = replace(kept, a=kept.a + math.log(wrong), b=kept.b + math.log(wrong))
        assert worst_bias(off, 24) > 5


# --- heads, and beside other pools


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("size", [{"n": 9}, {"rate": 0.3}])
def test_one_sample_for_all_heads_or_one_for_each(size, per_head):
    pool = Uniform(**size, per_head=per_head)
    new = tokens(torch.arange(100).expand(1, 4, -1))
    kept, _ = pool.fold(
        tokens(torch.empty(1, 4, 0).long()),
        new,
        Fold(CounterRNG(0), torch.tensor([100]), AttentionParams(1.0)),
    )
    heads = {tuple(head) for head in kept.position[0].tolist()}
    assert len(heads) == (4 if per_head else 1)


def test_where_nobody_gets_in_nothing_is_copied():
    held = arrivals(0, 4, 2)
    told = ManySeeds(torch.tensor([[[0.1, 0.1, 0.1, 0.1, 0.5, 0.6]] * 2], dtype=torch.float64))
    fold = Fold(told, torch.tensor([6]), AttentionParams(1.0))
    for pool in (Uniform(4), Uniform(rate=0.3)):
        kept, rest = pool.fold(held, arrivals(4, 6, 2), fold)
        assert kept is held
        assert rest.position[0].tolist() == [[4, 5], [4, 5]]


def test_plain_it_passes_on_what_it_does_not_hold():
    pipe = Pipe((Recent(3), Uniform(6), Heavy(8)))
    for row in Streams(pipe, 5).run(400):
        for head in range(2):
            sample, heavy = (row.held[i].position[0, head].tolist() for i in (1, 2))
            assert len(set(sample + heavy)) == 14
    pipe = Pipe((Uniform(6), Recent(500)))
    (row,) = Streams(pipe, 5).run(400)
    for head in range(2):
        found = [p for slots in row.held for p in slots.position[0, head].tolist()]
        assert sorted(found) == list(range(400))


# --- the named policy


@pytest.mark.parametrize(
    ("text", "pools"),
    [
        ("uniform", (Sink(32), Recent(32), Uniform(192, weighted=True))),
        ("uniform(budget=2048)", (Sink(256), Recent(256), Uniform(1536, weighted=True))),
        ("uniform(64, sinks=0, recent=10)", (Recent(10), Uniform(54, weighted=True))),
        ("uniform(64, weighted=false)", (Sink(8), Recent(8), Uniform(48))),
        ("uniform(rate=.25)", (Sink(32), Recent(32), Uniform(rate=0.25, weighted=True))),
        (
            "uniform(rate=0.5, sinks=4, recent=60, per_head=false)",
            (Sink(4), Recent(60), Uniform(None, 0.5, True, False)),
        ),
        ("uniform(n=9)", (Uniform(9),)),
        ("recent(3) | uniform(9)", (Recent(3), Uniform(9))),
    ],
)
def test_the_policy_and_the_pool_of_one_name(text, pools):
    made = policy(text)
    assert made.pools == pools
    assert policy(str(made)) == made
    assert policy(str(Pipe(pools))) == made


def test_by_rate_the_policy_has_no_limit():
    assert policy("uniform(rate=0.25)").slots is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("uniform(2)", r"a budget of 2 leaves no room for samples beside 1 sinks and"),
        ("uniform(64, sinks=4, recent=60)", "samples beside 4 sinks and 60 recent tokens"),
        ("uniform(64, 0.5)", "takes a budget or a rate, and was given both, 64 and 0.5"),
        ("uniform(rate=2)", "above 0 to 1 or none, not 2"),
    ],
)
def test_budgets_that_cannot_be_kept_are_refused(text, reason):
    with pytest.raises(weir.PolicyError, match=reason):
        policy(text)
