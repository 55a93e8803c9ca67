"""Which positions of a stream count as held, compared with a count over all slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import weir
from weir.stream import HeldPlaces, HeldRanges, held_ranges

HELD = 0.5


def holding_of(rng: np.random.Generator, seen: int, layers: int, heads: int, slots: int) -> Any:
    """Return a snapshot in which pairs hold some tokens, and some of them twice."""
    kept = [rng.integers(max(0, seen - 2 * slots), seen, slots) for _ in range(layers * heads)]
    pair = np.repeat(np.arange(layers * heads), slots)
    token, layer, head = (
        torch.from_numpy(found) for found in (np.concatenate(kept), pair // heads, pair % heads)
    )
    return SimpleNamespace(token=token, layer=layer, head=head, seen=seen, pairs=layers * heads)


def count_shares(holding: Any) -> list[float]:
    """Return the share of pairs that hold each token, counted slot by slot."""
    where: list[set[tuple[int, int]]] = [set() for _ in range(holding.seen)]
    slots = zip(holding.token.tolist(), holding.layer.tolist(), holding.head.tolist(), strict=True)
    for token, layer, head in slots:
        where[token].add((layer, head))
    return [len(pairs) / holding.pairs for pairs in where]


@pytest.mark.parametrize("seen", [1, 2, 9, 70])
def test_places_and_ranges_are_held_as_a_count_of_all_slots_says(seen):
    rng = np.random.default_rng(seen)
    holding = holding_of(rng, seen, layers=2, heads=3, slots=12)
    shares = count_shares(holding)
    stream: Any = SimpleNamespace(policy=None, seen=seen, holding=lambda: holding)
    places = HeldPlaces(stream)
    ranges = HeldRanges(held_ranges(holding), seen)
    held = 0
    for start in range(seen):
        for stop in range(start + 1, seen + 1):
            of_place = sum(shares[start:stop])
            if abs(of_place - HELD * (stop - start)) > 1e-9:
                assert places(start, stop) == (of_place > HELD * (stop - start))
            whole = sum(share >= HELD for share in shares[start:stop])
            assert ranges(start, stop) == (whole >= HELD * (stop - start))
            held += places(start, stop)
    assert held > 0
    assert not places(-1, 1) and not places(seen, seen + 1) and not places(1, 1)


def test_a_search_takes_no_memory_for_each_token_that_was_read():
    holding = holding_of(np.random.default_rng(0), 10**12, layers=1, heads=2, slots=100)
    stream: Any = SimpleNamespace(policy=None, seen=10**12, holding=lambda: holding)
    assert not HeldPlaces(stream)(5, 10)
    assert len(held_ranges(holding)) <= 200 * 8


def test_the_newest_tokens_are_held_where_a_stream_computes_them_again(llama):
    stream = weir.Stream(llama, "recompute(20)")
    stream.feed(torch.arange(60)[None])
    places = HeldPlaces(stream)
    assert [places(0, 40), places(30, 50), places(29, 50), places(40, 60)] == [
        False,
        True,
        False,
        True,
    ]
