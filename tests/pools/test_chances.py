"""Random samples under thousands of seeds: which tokens are kept, and with what weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling import ManySeeds, arrivals, bias, folds, sums, unevenness, z_of_chi_square
from streams import tokens

from weir.pools import Fold, Pool, Reservoir, Uniform
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams
from weir.slab.slots import Slots

pytestmark = pytest.mark.thinned(3, least=2)

SEEDS, SAMPLES, MIDDLE = 4000, 8, 56
KEYS = torch.randn(24, 3, generator=torch.Generator().manual_seed(3)) * 0.5
QUERIES = torch.randn(4, 3, generator=torch.Generator().manual_seed(4))


def reservoir(n: int, weighted: bool = False) -> Pool:
    return Reservoir(n, weighted, per_head=True)


def uniform(n: int, weighted: bool = False) -> Pool:
    return Uniform(n, weighted=weighted)


SIZED = pytest.mark.parametrize("make", [reservoir, uniform])
WEIGHTED = pytest.mark.parametrize(
    "pool", [reservoir(8, True), uniform(8, True), Uniform(rate=1 / 3, weighted=True)]
)


@pytest.fixture(scope="module")
def seeds() -> ManySeeds:
    """4,000 seeds at once, one for each head."""
    return ManySeeds.of(SEEDS, MIDDLE)


CUTS = {
    "one at a time": list(range(1, MIDDLE + 1)),
    "by sevens": list(range(7, MIDDLE + 1, 7)),
    "unevenly": [3, 5, 20, 21, 50, 56],
    "all at once": [MIDDLE],
}


@pytest.mark.parametrize("cut", CUTS)
@SIZED
def test_at_every_step_every_token_that_came_is_equally_likely_to_be_there(seeds, make, cut):
    for came, kept in folds(make(SAMPLES), seeds, CUTS[cut]):
        counts = kept.position[kept.held].bincount(minlength=came)
        assert int(counts.sum()) == SEEDS * min(came, SAMPLES)
        if came <= SAMPLES:
            assert counts.eq(SEEDS).all()
        else:
            assert unevenness(counts, SEEDS, SAMPLES) < 5, came


def test_by_rate_every_token_is_kept_with_that_probability_and_for_itself(seeds):
    *_, (_, kept) = folds(Uniform(rate=0.25), seeds, CUTS["by sevens"])
    counts = kept.position[kept.held].bincount(minlength=MIDDLE)
    chi = ((counts - SEEDS * 0.25) ** 2).sum().item() / (SEEDS * 0.25 * 0.75)
    assert z_of_chi_square(chi, MIDDLE) < 5
    sizes = kept.held.sum(dim=2).double()[0]
    # The variance of a binomial distribution. If some tokens were kept together, sizes would vary
    # more.
    variance = MIDDLE * 0.25 * 0.75
    assert abs(float(sizes.var()) - variance) < 5 * variance * math.sqrt(2 / SEEDS)


@SIZED
def test_every_pair_of_tokens_is_equally_likely_to_be_there_together(seeds, make):
    *_, (_, kept) = folds(make(2), seeds, list(range(1, 8)))
    found = Counter(tuple(sorted(pair)) for pair in kept.position[0].tolist())
    share = SEEDS / math.comb(7, 2)
    chi = sum((count - share) ** 2 / share for count in found.values())
    assert len(found) == 21
    assert z_of_chi_square(chi, 20) < 5


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 12), st.booleans())
def test_it_makes_no_difference_how_arrivals_are_cut(steps, samples, weighted):
    draws = ManySeeds.of(3, sum(steps) + 1)
    cuts = [sum(steps[: i + 1]) for i in range(len(steps))]
    by_rate = Uniform(rate=0.4, weighted=weighted)
    for pool in (reservoir(samples, weighted), uniform(samples, weighted), by_rate):
        *_, (_, pieces) = folds(pool, draws, cuts)
        *_, (_, at_once) = folds(pool, draws, [sum(steps)])
        for name in ("position", "a", "b"):
            assert torch.equal(getattr(pieces, name), getattr(at_once, name))


def exact(came: int, query: torch.Tensor) -> torch.Tensor:
    """Numerator and denominator of attention over all tokens that arrived."""
    return sums(arrivals(0, came, 1, KEYS), query)[0]


def worst_bias(kept: Slots, came: int) -> float:
    """The largest bias over all queries and both sums, in standard deviations."""
    return max(bias(sums(kept, query), exact(came, query)) for query in QUERIES)


@WEIGHTED
def test_weighted_both_sums_are_unbiased_whenever_it_folds(seeds, pool):
    for came, kept in folds(pool, seeds, [9, 16, 24], KEYS):
        assert worst_bias(kept, came) < 5


@WEIGHTED
def test_other_weights_would_be_biased(seeds, pool):
    # The right sample, with weights that are a third of the right ones (as without weighting), and
    # with weights that are 4% or 6% too small or too large.
    *_, (_, kept) = folds(pool, seeds, [24], KEYS)
    for wrong in (1 / 3, *((23 / 24, 25 / 24) if pool.slots() else (0.94, 1.06))):
        off = replace(kept, a=kept.a + math.log(wrong), b=kept.b + math.log(wrong))
        assert worst_bias(off, 24) > 5


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("pool", [Reservoir(9), Uniform(9), Uniform(rate=0.3)])
def test_one_sample_for_all_heads_or_one_for_each(pool, per_head):
    pool, none = replace(pool, per_head=per_head), tokens(torch.empty(1, 4, 0).long())
    new, draws = tokens(torch.arange(100).expand(1, 4, -1)), CounterRNG(0)
    fold = Fold(draws, torch.tensor([100]), AttentionParams(1.0), state=pool.state(none))
    kept, _ = pool.fold(none, new, fold)
    assert len({tuple(head) for head in kept.position[0].tolist()}) == (4 if per_head else 1)


@pytest.mark.parametrize("pool", [reservoir(4), Uniform(4), Uniform(rate=0.3)])
def test_where_nobody_gets_in_nothing_is_copied(pool):
    held = arrivals(0, 4, 2)
    told = ManySeeds(torch.tensor([[[0.1, 0.1, 0.1, 0.1, 0.9, 0.9]] * 2], dtype=torch.float64))
    state = {"came": torch.tensor([[4, 4]])}
    fold = Fold(told, torch.tensor([6]), AttentionParams(1.0), state=state)
    kept, rest = pool.fold(held, arrivals(4, 6, 2), fold)
    assert kept is held
    assert rest.position[0].tolist() == [[4, 5], [4, 5]]
