"""Weights fitted by attention matching: the fit itself, its limits, and what stays unchanged."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from reference.match import naive_factors
from roundings import close
from torch import Tensor

import weir
from weir.errors import WeirError
from weir.pools import Fold, Heavy, Match, ObservedAttention, Recent
from weir.pools.counter_rng import CounterRNG
from weir.pools.match import MOST, fit_weights
from weir.slab import AttentionParams, LayerPositions, Slots

FORM = AttentionParams(0.5)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_it_holds_the_tokens_of_the_pool_it_goes_around(llama, ids):
    """Centers are picked by keys, which weights do not change in the first layer."""
    text = ids(1, 60)
    pools = ("kcenter(6)", "match(kcenter(6), window=4)")
    plain, matched = (weir.Stream(llama, f"recent(8) | {pool}", chunk=7) for pool in pools)
    assert matched.policy.pools[-1] == Match(weir.pools.KCenter(6), window=4)
    for stream in (plain, matched):
        stream.feed(text)
    one, other = plain.slots(0), matched.slots(0)
    assert torch.equal(one.position, other.position)
    middle = other.pool == 1
    assert other.a[middle].ne(0).any() and other.a[~middle & (other.position >= 0)].eq(0).all()
    assert torch.equal(other.a, other.b)


# --- what is fitted: folds without a model


def tokens(keys: Tensor, values: Tensor, first: int) -> Slots:
    """Tokens from place `first` on [batch, heads, n, dim]."""
    position = torch.arange(first, first + keys.shape[2]).expand(*keys.shape[:2], -1)
    weights = torch.zeros(position.shape)
    return Slots(keys, values, weights, weights.clone(), position)


def reading(whole: Slots, queries: Tensor, output: Tensor | None = None) -> ObservedAttention:
    """The attention of the last queries [batch, heads, group, n, dim], without positions."""
    nowhere = whole.position[:, :, :0]
    ahead = torch.full((len(queries),), int(whole.position.max()) + 1 + queries.shape[3])
    projection = None if output is None else lambda dim, device: output
    return ObservedAttention(
        lambda: whole, lambda: nowhere, queries, ahead, FORM, LayerPositions(), projection
    )


@pytest.mark.parametrize("projected", [False, True])
def test_factors_are_those_of_least_squares_written_out(projected):
    rest = tokens(random(2, 2, 5, 4), random(2, 2, 5, 3), 0)
    whole = tokens(random(2, 2, 9, 4), random(2, 2, 9, 3), 5)
    whole.b = 0.3 * random(2, 2, 9)
    whole.a = whole.b + 0.1
    queries = random(2, 2, 3, 8, 4)
    output = random(2, 3, 3, 3) if projected else None
    read = reading(rest.join(whole), queries, output)
    stays = [1, 2, 6, 8]
    kept = whole.take(torch.tensor(stays).expand(2, 2, -1))
    got = fit_weights(read, whole, kept, window=6, pull=0.5, most=50.0)
    gave = read.attention(whole)[:, :, :, -6:].double().numpy()
    answers = read.answers[:, :, :, -6:].double().numpy()
    for row in range(2):
        for head in range(2):
            values = math.exp(0.1) * whole.values[row, head].double().numpy()
            turns = np.stack([np.eye(3)] * 3) if output is None else output[head].double().numpy()
            wanted = naive_factors(
                gave[row, head],
                np.stack([values @ turn.T for turn in turns]),
                stays,
                np.stack(
                    [its @ turn.T for its, turn in zip(answers[row, head], turns, strict=True)]
                ),
                0.5,
            )
            # Normal equations have the square of the rows' condition number. `pull` keeps it below
            # 100.
            close(got[row, head], torch.from_numpy(wanted).float(), terms=100 * 18 * 4)


def folded(pool: Match, held: Slots, new: Slots, queries: Tensor, rest: Slots) -> Slots:
    """Fold arrivals into a pool, and return the slots that it then holds."""
    read = reading(rest.join(held).join(new), queries)
    fold = Fold(CounterRNG(0), read.next, FORM, queries, read, state=pool.state(new.part(0, 0)))
    kept, gone = pool.fold(held, new, fold)
    assert len(gone) == 0
    return kept


def alike(n: int, first: int) -> Slots:
    """n tokens from place `first` on, all with the same key and the same value."""
    key, value = random(1, 2, 1, 4), random(1, 2, 1, 3)
    return tokens(key.expand(-1, -1, n, -1), value.expand(-1, -1, n, -1), first)


def test_of_equal_tokens_those_that_stay_count_for_all():
    queries, rest = random(1, 2, 3, 8, 4), tokens(random(1, 2, 2, 4), random(1, 2, 2, 3), 0)
    none = rest.part(0, 0)
    kept = folded(Match(Recent(2), pull=0.01, window=8), none, alike(6, 5), queries, rest)
    # Each of the two stands for three tokens, and `pull` draws its factor towards 1, with a
    # hundredth of the weight of the fit. The matrix [[1.01, 1], [1, 1.01]] has a condition number
    # of 201.
    wanted = torch.full_like(kept.b, math.log((6 + 0.01) / (2 + 0.01)))
    close(kept.b, wanted, 201 * 8)
    assert torch.equal(kept.a, kept.b)
    held_back = folded(Match(Recent(2), pull=1e4, window=8), none, alike(6, 5), queries, rest)
    assert held_back.b.abs().max() < 1e-3


def test_no_weight_leaves_its_box():
    queries, rest = random(1, 2, 3, 8, 4), tokens(random(1, 2, 2, 4), random(1, 2, 2, 3), 0)
    kept = folded(Match(Recent(1), pull=1e-3), rest.part(0, 0), alike(90, 5), queries, rest)
    close(kept.b, torch.full_like(kept.b, MOST), 4)
    again = folded(Match(Recent(1), pull=1e-3, half_life=None), kept, alike(90, 99), queries, rest)
    assert again.b.max() <= MOST * (1 + 1e-6)


def test_weights_fade_by_what_arrives_and_nothing_is_weighed_while_there_is_room():
    queries, rest = random(1, 2, 3, 8, 4), tokens(random(1, 2, 2, 4), random(1, 2, 2, 3), 0)
    held, new = alike(3, 5), alike(2, 9)
    held.a = held.b = torch.full_like(held.b, 0.8)
    assert folded(Match(Heavy(5)), held, new, queries, rest).b.tolist() == [
        [[*held.b[0, 0].tolist(), 0.0, 0.0]] * 2
    ]
    pool = Match(Recent(3), half_life=2, pull=1e9)
    kept = folded(pool, held, new, queries, rest)  # one held token stays, with half its log-weight
    close(kept.b[:, :, 0], torch.full_like(kept.b[:, :, 0], 0.4), 8)


def test_the_last_queries_get_nearly_what_they_got():
    """Four of twelve tokens stay. With weights, their attention is closer to that of all twelve."""
    queries, rest = random(1, 2, 1, 16, 4), tokens(random(1, 2, 3, 4), random(1, 2, 3, 3), 0)
    new = tokens(random(1, 2, 12, 4), random(1, 2, 12, 3), 3)
    read = reading(rest.join(new), queries)
    wanted = read.attention(new).sum(dim=4)
    off = []
    for pull in (1e9, 0.01):
        kept = folded(Match(Recent(4), window=16, pull=pull), new.part(0, 0), new, queries, rest)
        off.append((read.attention(kept).sum(dim=4) - wanted).square().mean())
    assert off[1] < off[0] / 4


def test_inside_it_a_pool_stands_where_it_stands():
    """`recent` before it holds the window of `snap`, so all its slots are for other tokens."""
    made = weir.policy("attention_matching(budget=128)")
    assert made.stands_for == "sink(4) | recent(92) | match(snap(32))"
    assert weir.policy(made.stands_for).pools == made.pools
    with pytest.raises(WeirError, match="budget of snap must be at least"):
        weir.policy("sink(4) | match(snap(32))")
