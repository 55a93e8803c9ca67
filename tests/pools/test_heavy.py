"""Heavy hitters: the tokens that received the most attention stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference.heavy import heavy_of
from roundings import close_runs, run_off
from streams import NaiveRow, Streams, fed, places, tokens, unharmed

import weir
from weir.policies.grammar import policy
from weir.pools import Fold, Heavy
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams

FOLD = Fold(CounterRNG(0), torch.tensor([0]), AttentionParams(1.0))
PADDING = (0, 3, 9)
PROMPT, MORE = 40, 50


def with_mass(mass: list[list[float]], start: int = 0):
    """One row's tokens from place `start` on with what they have received, by head."""
    width = len(mass[0])
    slots = tokens(torch.arange(start, start + width).expand(1, len(mass), -1))
    slots.mass = torch.tensor([mass])
    return slots


# --- against the naive loop


@pytest.mark.parametrize(("chunk", "length"), [(1, 200), (7, 600), (64, 1000)])
def test_its_slots_are_those_of_the_naive_loop_over_thousands_of_tokens(twins, chunk, length):
    pipe, starts = policy("sink(2) | recent(9) | heavy(16)"), (0, 3, 3)
    naive = twins.pipe(twins.sink(2), twins.recent(9), heavy_of(16))
    loops = [NaiveRow(naive, 3, chunk, row) for row in range(len(starts))]
    changed = 0

    def watch(index, row):
        nonlocal changed
        before = loops[index].places(2)
        loops[index].until(row.seen)
        changed += before != loops[index].places(2)
        for pool in range(3):
            assert places(row.held[pool]) == loops[index].places(pool)

    streams = Streams(pipe, chunk, starts, watch=watch)
    for row in streams.run(length):
        assert all(map(unharmed, row.held))
    assert changed > 30
    one, other = places(streams.rows[1].held[2])
    assert one != other != places(streams.rows[2].held[2])[1]


@pytest.mark.parametrize(
    "text", ["heavy(5)", "recent(4) | heavy(5) | heavy(6)", "heavy(3) | recent(4) | heavy(6)"]
)
def test_wherever_it_stands_its_slots_are_those_of_the_naive_loop(twins, text):
    made = {"heavy": heavy_of, "recent": twins.recent}
    pools = [made[pool.name](pool.n) for pool in policy(text).pools]
    loops = [NaiveRow(twins.pipe(*pools), len(pools), 3, row, heads=3) for row in range(2)]

    def watch(index, row):
        loops[index].until(row.seen)
        for pool in range(len(pools)):
            assert places(row.held[pool]) == loops[index].places(pool)

    for row in Streams(policy(text), 3, (0, 7), heads=3, watch=watch).run(300):
        assert all(map(unharmed, row.held))


@pytest.mark.parametrize(("prefill", "chunk"), [("chunked", 4), ("full", 1)])
def test_a_model_with_it_gives_what_the_naive_loop_gives(llama, naive, twins, ids, chunk, prefill):
    text = ids(3, PROMPT + MORE)
    mask = torch.ones_like(text)
    for row, pads in enumerate(PADDING):
        mask[row, :pads] = 0
    cache = weir.StreamingCache(llama, "recent(6) | heavy(7)", chunk=chunk, prefill=prefill)
    with torch.no_grad():
        first = llama(text[:, :PROMPT], attention_mask=mask[:, :PROMPT], past_key_values=cache)
        second = llama(text[:, PROMPT:], attention_mask=mask, past_key_values=cache)
    got = torch.cat([first.logits, second.logits], dim=1)
    for row, pads in enumerate(PADDING):
        loop = naive(llama, twins.pipe(twins.recent(6), heavy_of(7)), 2, chunk)
        wanted = [loop.feed(text[row, pads:PROMPT].tolist(), at_once=prefill == "full")]
        wanted.append(loop.feed(text[row, PROMPT:].tolist()))
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


# --- in a model


# --- bad input


@pytest.mark.parametrize("heads", [1, 3])
def test_tokens_that_received_nothing_or_the_same_are_kept_from_the_oldest_on(heads):
    for mass in (0.0, 2.5):
        equal = with_mass([[mass] * 9] * heads)
        held, rest = Heavy(4).fold(with_mass([[]] * heads), equal, FOLD)
        assert places(held) == [[0, 1, 2, 3]] * heads
        assert places(rest) == [[4, 5, 6, 7, 8]] * heads
