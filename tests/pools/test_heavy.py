"""Heavy hitters: the tokens that received the most attention stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from roundings import close_runs, run_off
from streams import PADDING, PROMPT, compare, fed, naive_pools, places, read, tokens, unharmed

from weir.pools import Fold, Heavy
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams

pytestmark = pytest.mark.thinned(3, least=2)

FOLD = Fold(CounterRNG(0), torch.tensor([0]), AttentionParams(1.0))


def with_mass(mass: list[list[float]], start: int = 0):
    """Tokens of one row from place `start` on; `mass` has the attention each received, by head."""
    width = len(mass[0])
    slots = tokens(torch.arange(start, start + width).expand(1, len(mass), -1))
    slots.mass = torch.tensor([mass])
    return slots


# --- against the naive loop


@pytest.mark.parametrize(("chunk", "length"), [(1, 200), (7, 600), (64, 1000)])
def test_its_slots_are_those_of_the_naive_loop_over_thousands_of_tokens(twins, chunk, length):
    rows = compare(twins, "sink(2) | recent(9) | heavy(16)", chunk, length)
    one, other = places(rows[1].held[2])
    assert one != other != places(rows[2].held[2])[1]


@pytest.mark.parametrize(
    "text", ["heavy(5)", "recent(4) | heavy(5) | heavy(6)", "heavy(3) | recent(4) | heavy(6)"]
)
def test_wherever_it_stands_its_slots_are_those_of_the_naive_loop(twins, text):
    compare(twins, text, 3, 300, starts=(0, 7), heads=3)


@pytest.mark.parametrize(("prefill", "chunk"), [("chunked", 4), ("full", 1)])
def test_a_model_with_it_gives_what_the_naive_loop_gives(llama, naive, twins, ids, chunk, prefill):
    text = "recent(6) | heavy(7)"
    got, cache, rows = read(llama, ids, text, chunk, prefill)
    for row, pads in enumerate(PADDING):
        loop = naive(llama, twins.pipe(*naive_pools(text, twins)), 2, chunk)
        wanted = [loop.feed(rows[row][: PROMPT - pads], at_once=prefill == "full")]
        wanted.append(loop.feed(rows[row][PROMPT - pads :]))
        close_runs(got[row, pads:], torch.cat(wanted), llama)
        for layer in range(2):
            held = cache.slots(layer)
            for head in range(2):
                received = loop.received(layer, head)
                bound = run_off(llama) * max(received.values())
                where = held.position[row, head].tolist()
                mine = dict(zip(where, held.mass[row, head].tolist(), strict=True))
                mine.pop(-1, None)
                assert mine == pytest.approx(received, abs=bound)


# --- what the rule says


@given(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=8))
def test_the_heaviest_stay_and_of_equal_ones_the_oldest_however_they_arrive(n, sizes):
    held, gone = fed(Heavy(n), sizes)
    count = sum(sizes)
    alone, _ = fed(Heavy(n), [1] * count)
    assert places(held) == places(alone)
    everything, _ = fed(Heavy(count + 1), [count])
    left = [places(rest) for rest in gone]
    for head in range(2):
        received = everything.mass[0, head].tolist()
        order = sorted(range(count), key=lambda place: (-received[place], place))
        assert places(held)[head] == sorted(order[:n])
        flowed = [place for rest in left for place in rest[head]]
        assert sorted(flowed) == sorted(order[n:])


def test_a_token_that_was_evicted_does_not_come_back():
    held, rest = Heavy(2).fold(with_mass([[5.0, 3.0]]), with_mass([[4.0]], start=2), FOLD)
    assert (places(held), places(rest)) == ([[0, 2]], [[1]])
    assert held.mass.tolist() == [[[5.0, 4.0]]]
    assert unharmed(held)
    assert unharmed(rest)


def test_every_head_decides_for_itself():
    masses = [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]
    held, rest = Heavy(2).fold(with_mass([[], []]), with_mass(masses), FOLD)
    assert (places(held), places(rest)) == ([[1, 2], [0, 1]], [[0], [2]])


@pytest.mark.parametrize("heads", [1, 3])
def test_tokens_that_received_nothing_or_the_same_are_kept_from_the_oldest_on(heads):
    for mass in (0.0, 2.5):
        equal = with_mass([[mass] * 9] * heads)
        held, rest = Heavy(4).fold(with_mass([[]] * heads), equal, FOLD)
        assert places(held) == [[0, 1, 2, 3]] * heads
        assert places(rest) == [[4, 5, 6, 7, 8]] * heads
