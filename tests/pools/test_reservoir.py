"""The pool `reservoir`: Algorithm R over all tokens that left the window, a chunk at a time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from reference.reservoir import Arrivals, Cache, figure_2
from roundings import close, largest
from sampling import arrivals, unevenness
from streams import Row, Streams, tokens

import weir
from weir.policies.pipe import Pipe
from weir.pools import Fold, Heavy, Pool, Recent, Reservoir, Sink
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams
from weir.slab.slots import Slots

pytestmark = pytest.mark.thinned(3, least=2)


def draws_of(head: int, pool: int, places: int, seed: int = 0):
    """A function from a token to its number in one head."""
    place = torch.arange(places).expand(1, head + 1, -1)
    table = CounterRNG(seed, 0, pool).uniform(0, place)[0, head].tolist()
    return table.__getitem__


# --- the paper's algorithm, slot by slot


@pytest.mark.parametrize(
    ("chunk", "length", "weighted", "per_head"),
    [(1, 200, True, True), (7, 600, False, False), (64, 1200, True, True)],
)
def test_it_holds_what_algorithm_r_holds_slot_by_slot(chunk, length, weighted, per_head):
    sinks, samples, window = 3, 10, 6
    pipe = Pipe((Sink(sinks), Recent(window), Reservoir(samples, weighted, per_head)))
    starts = (0, 3, 11)
    loops = {
        (row, head): Cache(sinks, samples, window, draws_of(head if per_head else 0, 2, length))
        for row in range(len(starts))
        for head in range(2)
    }

    def watch(index: int, row: Row) -> None:
        for head in range(2):
            loop = loops[index, head]
            while loop.total_num < row.seen:
                loop.add()
            kept = row.held[2]
            assert kept.position[0, head].tolist() == loop.sample
            came = tokens(kept.position)  # keys, values and weights as they were on arrival
            assert torch.equal(kept.keys, came.keys)
            assert torch.equal(kept.values, came.values)
            factor = loop.log_weight if weighted else 0.0
            for now, then in ((kept.a, came.a), (kept.b, came.b)):
                close(now[0, head], then[0, head] + factor, size=factor + largest(then))

    Streams(pipe, chunk, starts, watch=watch).run(length)
    assert all(loop.total_num > length - chunk for loop in loops.values())


@dataclass(frozen=True)
class Told:
    """A stand-in for `CounterRNG` with a given number for each token, the same in every head."""

    numbers: tuple[float, ...]
    pool: int = 0

    def of_layer(self):
        return self

    def uniform(self, purpose, position, index=0):
        return torch.tensor(self.numbers, dtype=torch.float64)[position.clamp_min(0)]


def figure_4(*numbers: float) -> list[list[int]]:
    """The tokens that the paper's example (two sinks, two samples, two recent tokens) holds after
    each of nine tokens. `numbers` are the random numbers of token 4 and of those after it.
    """
    pipe = Pipe((Sink(2), Recent(2), Reservoir(2)))
    states = [pool.state(arrivals(0, 0, 1)) for pool in pipe.pools]
    held = [arrivals(0, 0, 1)] * 3
    steps = []
    for token in range(9):
        draws = Told((0.0,) * 4 + numbers + (0.0,) * 9)
        fold = Fold(draws, torch.tensor([token + 1]), AttentionParams(1.0))
        held = pipe.fold(held, arrivals(token, token + 1, 1), fold, states)
        sink, recent, middle = (slots.position[0, 0].tolist() for slots in held)
        steps.append([*sink, *sorted(middle), *recent])
    return steps


def test_figure_4_step_by_step():
    # Token 4 is kept (p = 2/3) and replaces token 2. Token 5 is not kept (p = 2/4). Token 6 is kept
    # (p = 2/5) and replaces token 3.
    steps = figure_4(0.2, 0.9, 0.3)
    assert steps[:6] == [list(range(n + 1)) for n in range(6)]
    assert steps[6] == [0, 1, 3, 4, 5, 6]
    assert steps[7] == [0, 1, 3, 4, 6, 7]
    assert steps[8] == [0, 1, 4, 6, 7, 8]


@pytest.mark.parametrize(("token", "p"), [(4, 2 / 3), (5, 2 / 4), (6, 2 / 5)])
def test_the_chances_of_figure_4(token, p):
    def middle(number: float) -> list[int]:
        chances = [0.999] * 3
        chances[token - 4] = number
        return figure_4(*chances)[token + 2][2:4]

    assert middle(p + 1e-9) == [2, 3]
    # Below p, each of the two old samples is replaced in one half of the cases.
    assert middle(p - 1e-9) == middle(p / 2 + 1e-9) == [2, token]
    assert middle(0.0) == middle(p / 2 - 1e-9) == [3, token]


# --- the distribution

SEEDS, SAMPLES, MIDDLE = 4000, 8, 56


def counts_of(kept: Slots, came: int) -> torch.Tensor:
    """How many heads hold each of the tokens that came."""
    return kept.position[kept.held].bincount(minlength=came)


def test_the_code_of_figure_2_keeps_old_tokens_less_often():
    # In section 3, the paper samples again from the tokens that are still cached. With such a pool,
    # the tests in test_chances.py would fail.
    random = Random(0)
    runs = [figure_2(SAMPLES, MIDDLE, random) for _ in range(SEEDS)]
    for came in range(SAMPLES + 2, MIDDLE + 1):
        kept = Counter(token for run in runs for token in run[came - 1])
        counts = torch.tensor([kept[token] for token in range(came)])
        assert unevenness(counts, SEEDS, SAMPLES) > 10, came
        # It forgets: a token that is k steps old is still held with probability (s/(s + 1))^k.
        oldest = SEEDS * (SAMPLES / (SAMPLES + 1)) ** (came - SAMPLES)
        assert abs(counts[0] - oldest) < 5 * math.sqrt(oldest)


# --- weights


def test_plain_it_changes_no_weights_and_passes_on_all_it_does_not_hold():
    pool = Reservoir(4, per_head=True)
    held, gone = tokens(torch.empty(1, 2, 0, dtype=torch.int64)), [[], []]
    state = pool.state(held)
    for start in range(0, 60, 5):
        new = tokens(torch.arange(start, start + 5).expand(1, 2, -1))
        held, rest = pool.fold(
            held, new, Fold(CounterRNG(1), torch.tensor([0]), AttentionParams(1.0), state=state)
        )
        for slots in (held, rest):
            came = tokens(slots.position)
            for name, t in slots.tensors().items():
                if name != "mass":
                    assert torch.equal(t.nan_to_num(7), came.tensors()[name].nan_to_num(7)), name
        for head in range(2):
            gone[head] += rest.position[0, head][rest.held[0, head]].tolist()
            here = held.position[0, head].tolist()
            assert sorted(here + gone[head]) == list(range(start + 5))


# --- heads, layers, seeds


def test_layers_and_seeds_have_samples_of_their_own(llama, ids):
    found = set()
    for seed in range(3):
        stream = weir.Stream(llama, "sink(1) | recent(4) | reservoir(6)", chunk=4, seed=seed)
        stream.feed(ids(1, 90))
        for layer in range(2):
            held = stream.slots(layer)
            found.add(tuple(held.position[0, 0][held.pool[0, 0] == 2].tolist()))
    assert len(found) == 6


# --- together with other pools


@dataclass(frozen=True)
class Halving(Pool):
    """Loses tokens: head h passes on one of h + 2 arrivals, with its weight multiplied by h + 2."""

    name = "halving"

    def slots(self) -> int:
        return 1

    def fold(self, held: Slots, new: Slots, fold: Fold) -> tuple[Slots, Slots]:
        head = torch.arange(new.position.shape[1])[None, :, None] + 2
        passed = new.only(new.position % head == 0)
        weight = head.float().log()
        return held, replace(passed, a=passed.a + weight, b=passed.b + weight)


@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.thinned(2)
def test_after_a_pool_that_loses_tokens_it_counts_what_arrives_and_weights_multiply(chunk):
    pipe = Pipe((Recent(3), Halving(), Reservoir(5, weighted=True, per_head=True)))
    loops = [Arrivals(5, draws_of(head, 2, 400)) for head in range(3)]
    fed = [0]

    def watch(index: int, row: Row) -> None:
        kept = row.held[2]
        for token in range(fed[0], max(0, row.seen - 3)):
            for head, loop in enumerate(loops):
                if token % (head + 2) == 0:
                    loop.add(token)
        fed[0] = max(0, row.seen - 3)
        for head, loop in enumerate(loops):
            here = kept.held[0, head]
            assert kept.position[0, head][here].tolist() == loop.sample
            factor = (head + 2) * max(1.0, loop.came / 5)
            came = tokens(kept.position)
            for now, then in ((kept.a, came.a), (kept.b, came.b)):
                wanted = then[0, head] + math.log(factor)
                close(now[0, head][here], wanted[here], size=math.log(factor) + largest(then))

    Streams(pipe, chunk, heads=3, watch=watch).run(400)


def test_after_a_pool_that_chooses_it_sees_what_that_one_let_go():
    pipe = Pipe((Recent(3), Heavy(6), Reservoir(8, per_head=True)))
    held = Streams(pipe, 5).run(400)[0].held
    for head in range(2):
        heavy, sample = (held[i].position[0, head].tolist() for i in (1, 2))
        assert len(set(heavy + sample)) == 14
    assert Streams(pipe, 5).run(400)[0].states[2]["came"].tolist() == [[400 - 9] * 2]


def test_two_samples_in_one_pipe_have_draws_of_their_own():
    # Tokens that the first sample does not take have high random numbers there. With the same
    # numbers in the second sample, they would enter it less often than tokens that the first held
    # for a while.
    runs, came = 600, 30
    pipe = Pipe((Reservoir(4, per_head=True), Reservoir(4, per_head=True)))
    streams = Streams(pipe, came, heads=runs).run(came)
    counts = counts_of(streams[0].held[1], came)
    assert unevenness(counts, runs, 4) < 5


def test_tokens_that_never_came_are_not_counted():
    pool = Reservoir(3, weighted=True)
    state = pool.state(arrivals(0, 0, 2))
    new = tokens(torch.tensor([[[-1, 4, -1, 6], [3, 4, 5, 6]]]))
    held, rest = pool.fold(
        arrivals(0, 0, 2),
        new,
        fold := Fold(CounterRNG(0), torch.tensor([7]), AttentionParams(1.0), state=state),
    )
    assert fold.state["came"].tolist() == [[2, 4]]
    assert held.position[0, 0].tolist() == [4, 6, -1]
    assert held.b[0, 0, 2] == -math.inf
    assert len(rest) == 0
