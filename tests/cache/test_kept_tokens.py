"""Tokens that a row is told to keep are held for as long as its stream lasts."""

from __future__ import annotations

import pytest
import torch

import weir
from weir.errors import WeirError
from weir.pools import Kept, Marks

POLICIES = [
    "sink(4) | recent(32)",
    "sink(4) | recent(24) | kcenter(16)",
    "recent(16) | recent(16):int8 | kcenter(16):int8",
    "h2o(48)",
    "streaming_llm(48)",
    "snapkv(48, window=8)",
    "weir(budget=64)",
]
RANGES = ((20, 45), (300, 310))
LONG = 1500


@pytest.fixture(scope="module")
def model():
    return weir.load("nano")[0]


def ids(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop) % 300 + 20


def kept_places(cache, row=0) -> list[set[int]]:
    """The places that the pool `kept` holds, for each layer and head of a row."""
    held = cache.holding(row)
    pool = held.pools.index("kept")
    mine = held.pool == pool
    pairs = {(int(a), int(b)) for a, b in zip(held.layer, held.head, strict=True)}
    return [
        set(held.token[mine & (held.layer == layer) & (held.head == head)].tolist())
        for layer, head in sorted(pairs)
    ]


def marked(model, policy: str, n=40, form="same"):
    stream = weir.Stream(model, f"pinned({policy}, n={n}, header=4, format={form})")
    stream.feed(ids(0, 10))
    stream.cache.mark(0, Marks(5, kept=RANGES))
    return stream


@pytest.mark.parametrize("policy", POLICIES)
def test_they_are_held_far_beyond_the_window(model, policy):
    stream = marked(model, policy)
    stream.feed(ids(10, LONG))
    own = {place for start, stop in RANGES for place in range(start, stop)}
    assert all(places == own for places in kept_places(stream.cache))
    stream.cache.mark(0, Marks(5, kept=RANGES[:1]))
    stream.feed(ids(LONG, LONG + 64))
    assert all(places == set(range(*RANGES[0])) for places in kept_places(stream.cache))


def test_a_saved_row_goes_on_with_them(model):
    stream, other = (marked(model, POLICIES[1]) for _ in range(2))
    stream.feed(ids(10, 500))
    state = stream.cache.take_row(0)
    assert state.facts["marks"]["kept"] == [list(one) for one in RANGES]
    other.feed(ids(10, 20))
    other.cache.put_row(0, state)
    more = ids(500, LONG)
    assert torch.equal(stream.feed(more), other.feed(more))
    assert kept_places(stream.cache) == kept_places(other.cache)


def test_rows_of_one_batch_keep_what_they_keep_alone(model):
    policy = f"pinned({POLICIES[1]}, n=40, header=4)"
    ranges = [RANGES, (), ((25, 30),), RANGES]
    cache = weir.StreamingCache(model, policy, batch=4)
    both = ids(0, LONG).expand(4, -1)
    for row, kept in enumerate(ranges):
        cache.mark(row, Marks(5, kept=kept))
    for at in range(0, LONG, 100):
        model(both[:, at : at + 100], past_key_values=cache)
    for row, kept in enumerate(ranges):
        own = {place for start, stop in kept for place in range(start, stop)}
        assert all(places == own for places in kept_places(cache, row))


def test_attention_reads_a_kept_token_like_any_other(model):
    """Kept tokens that come right after the sinks are read like additional sinks."""
    kept = weir.Stream(model, "beginning(40) | sink(4) | recent(32) | kept(40)")
    sinks = weir.Stream(model, "beginning(40) | sink(29) | recent(32)")
    kept.cache.mark(0, Marks(5, kept=((9, 34),)))
    sinks.cache.mark(0, Marks(5))
    for start in range(0, LONG, 50):
        more = ids(start, start + 50)
        assert torch.allclose(kept.feed(more), sinks.feed(more), atol=1e-4)


@pytest.mark.parametrize(("beginning", "room"), [(5, 35), (38, 2), (None, 0), (60, 0)])
def test_more_than_there_is_room_for_is_refused(model, beginning, room):
    cache = weir.Stream(model, f"pinned({POLICIES[0]}, n=40, header=4)").cache
    assert cache.slots_to_keep == 40
    with pytest.raises(WeirError, match=rf"have room for only {room}$"):
        cache.mark(0, Marks(beginning, kept=((100, 101 + room),)))
    if room:
        cache.mark(0, Marks(beginning, kept=((100, 100 + room),)))


def test_a_state_with_more_than_there_is_room_for_is_refused(model):
    stream = marked(model, POLICIES[1])
    stream.feed(ids(10, 500))
    state = stream.cache.take_row(0)
    pools = stream.cache.plans[0].spec.pipe.pools
    at = next(n for n, pool in enumerate(pools) if isinstance(pool, Kept))
    state.facts["lengths"][0][at] = 36
    with pytest.raises(WeirError, match="kept tokens"):
        stream.cache.put_row(0, state)
    for kept in ([[9, 3]], [[1, "2"]], "x", [[1, 2]] * 2000):
        state = stream.cache.take_row(0)
        state.facts["marks"]["kept"] = kept
        with pytest.raises(WeirError, match=r"marks\.kept must be"):
            stream.cache.put_row(0, state)


def test_policies_without_the_pool_keep_no_marked_tokens(model):
    cache = weir.Stream(model, "beginning(4) | recent(16)").cache
    assert cache.slots_to_keep is None
    assert cache.room_to_keep(Marks(2)) is None
