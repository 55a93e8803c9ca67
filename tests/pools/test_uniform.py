"""Uniform sampling of all tokens that arrived: a fixed number, or a fixed share."""

from __future__ import annotations

import math

import pytest
import torch
from reference.uniform import by_budget, by_rate, log_weight
from roundings import close, largest
from sampling import ManySeeds, arrivals, unevenness
from streams import Row, Streams, tokens

from weir.policies.pipe import Pipe
from weir.pools import Fold, Heavy, Recent, Sink, Uniform
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams

pytestmark = pytest.mark.thinned(3, least=2)


def draws_of(head: int, pool: int, places: int):
    """A function from a token to its number in one head."""
    place = torch.arange(places).expand(1, head + 1, -1)
    return CounterRNG(0, 0, pool).uniform(0, place)[0, head].tolist().__getitem__


# --- against the textbook rule


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


def test_sampling_again_from_what_is_held_would_be_something_else():
    # If held tokens got new random numbers at every fold, old tokens would become rarer.
    seeds, held = ManySeeds.of(SEEDS, MIDDLE), arrivals(0, 0, SEEDS)
    for came in range(1, 21):
        draws = ManySeeds(seeds.table.roll(came, dims=1))
        fold = Fold(draws, torch.tensor([came]), AttentionParams(1.0))
        held, _ = Uniform(SAMPLES).fold(held, arrivals(came - 1, came, SEEDS), fold)
    assert unevenness(held.position.flatten().bincount(minlength=20), SEEDS, SAMPLES) > 10


# --- together with other pools


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
