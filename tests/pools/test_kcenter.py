"""k centers: the tokens whose keys lie farthest apart stay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_runs import fed, holds_as
from reference.kcenter import kcenter_of, squared_distance
from reference.naive import Naive
from roundings import close_runs, off
from torch import Tensor

import weir
from weir.pools import Fold, KCenter, Recent
from weir.pools.counter_rng import CounterRNG
from weir.pools.kcenter import farthest_first
from weir.slab import AttentionParams
from weir.slab.slots import Slots

pytestmark = pytest.mark.thinned(3, least=2)

FOLD = Fold(CounterRNG(0), torch.tensor([0]), AttentionParams(1.0))
BROKEN = replace(FOLD, unbroken=False)


@dataclass
class Token:
    """A token of the naive loop."""

    position: int


def slots_at(position: Tensor, keys: Tensor) -> Slots:
    """Tokens at places [batch, kv_heads, n], -1 for none; values and weights are computed
    from the places.

    `keys` [batch, kv_heads, length, key_dim] are those of the whole stream.
    """
    empty = position < 0
    mine = keys.gather(2, position.clamp_min(0)[..., None].expand(-1, -1, -1, keys.shape[3]))
    a = (position % 5 * 0.25).masked_fill(empty, -torch.inf)
    b = (position % 7 * 0.5).masked_fill(empty, -torch.inf)
    mass = (2.0 ** (position % 3)).masked_fill(empty, 0.0)
    return Slots(mine, position[..., None].expand(-1, -1, -1, 3).float(), a, b, position, mass)


def whole_keys(batch: int, heads: int, length: int, dim: int = 3, seed: int = 0) -> Tensor:
    """Keys of small whole numbers: distances are exact, and often equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, (batch, heads, length, dim), generator=generator).float()


def folds(pool: KCenter, keys: Tensor, chunk: int, share: float = 1.0) -> Iterator[tuple]:
    """Fold a stream `chunk` tokens at a time; each head of each row gets a `share` of its tokens.

    Yields (held, arrivals, overflow) of each fold.
    """
    generator = torch.Generator().manual_seed(1)
    held = slots_at(torch.empty(*keys.shape[:2], 0, dtype=torch.int64), keys)
    for start in range(0, keys.shape[2], chunk):
        place = torch.arange(start, min(start + chunk, keys.shape[2]))
        place = place.expand(*keys.shape[:2], -1)
        if share < 1:
            place = place.where(torch.rand(place.shape, generator=generator) < share, -1)
        new = slots_at(place, keys)
        held, rest = pool.fold(held, new, FOLD if share == 1 else BROKEN)
        yield held, new, rest


@pytest.mark.parametrize(
    ("pool", "chunk", "share", "length"),
    [
        (KCenter(12), 1, 1.0, 300),
        (KCenter(12), 7, 1.0, 500),
        (KCenter(12), 64, 1.0, 1000),
        (KCenter(12), 13, 0.4, 600),
        (KCenter(12, spans=1), 9, 1.0, 400),
        (KCenter(12, spans=2, fresh=0.5), 13, 0.6, 400),
        (KCenter(12, fresh=0.5), 9, 1.0, 400),
        (KCenter(12, use=1.0), 9, 0.6, 400),
    ],
)
def test_it_holds_what_a_naive_loop_holds(pool, chunk, share, length):
    k, keys = pool.k, whole_keys(2, 3, length)
    whole = keys.tolist()

    def weight(token: Token) -> float:
        # In FOLD, all tokens are equally old.
        return 2.0 ** (token.position % 3) if pool.use else 1.0

    naive = {
        (row, head): kcenter_of(
            k,
            lambda t, at, own=whole[row][head]: own[t.position],
            pool.spans,
            pool.fresh,
            weight,
        )
        for row in range(2)
        for head in range(3)
    }
    mine: dict[tuple[int, int], list[Token]] = {at: [] for at in naive}
    for held, new, rest in folds(pool, keys, chunk, share):
        assert bool(held.held.any(dim=0).any(dim=0).all()), "a column is empty in every head"
        for (row, head), fold in naive.items():
            arrived = [Token(p) for p in new.position[row, head].tolist() if p >= 0]
            mine[row, head], gone = fold(mine[row, head], arrived)
            for slots, wanted in ((held, mine[row, head]), (rest, gone)):
                places = slots.position[row, head]
                assert places[places >= 0].tolist() == [t.position for t in wanted]
        for slots in (held, rest):
            wanted_slots = slots_at(slots.position, keys)
            for name in ("a", "b"):
                assert torch.equal(getattr(slots, name), getattr(wanted_slots, name))
            there = slots.held[..., None]
            for name in ("keys", "values"):
                assert torch.equal(
                    getattr(slots, name) * there, getattr(wanted_slots, name) * there
                )


points = st.lists(st.tuples(*[st.integers(-20, 20)] * 2), min_size=2, max_size=9, unique=True)


def radius(centers: list, all_points: list) -> float:
    """The largest distance of a point to its nearest center."""
    return max(min(math.dist(p, c) for c in centers) for p in all_points)


@given(points, st.integers(1, 4))
def test_centers_lie_apart_by_the_radius_they_cover_and_no_others_cover_half_of_it(where, k):
    keys = torch.tensor(where, dtype=torch.float32)[None, None]
    k = min(k, len(where))
    picked = farthest_first(keys, torch.ones(1, 1, len(where), dtype=torch.bool), k)[0, 0]
    centers = [p for p, yes in zip(where, picked.tolist(), strict=True) if yes >= 0]
    assert len(centers) == k
    reached, exactly = radius(centers, where), 1 - off(2, torch.float64)
    for one, other in itertools.combinations(centers, 2):
        assert math.dist(one, other) >= reached * exactly
    best = min(radius(list(others), where) for others in itertools.combinations(where, k))
    assert reached * exactly <= 2 * best


def test_the_oldest_token_always_stays():
    for held, _, _ in folds(KCenter(1), whole_keys(2, 2, 50), 5):
        assert (held.position[:, :, 0] == 0).all()


@pytest.mark.parametrize("chunk", [1, 4])
def test_of_equal_keys_the_oldest_stay_and_no_slot_is_wasted(chunk):
    for held, _, _ in folds(KCenter(3), torch.ones(1, 2, 20, 4), chunk):
        assert held.position[0, 1].tolist() == list(range(min(3, len(held))))
    assert len(held) == 3


def test_distances_are_of_keys_moved_far_from_the_origin_too():
    # |x|^2 + |y|^2 - 2xy would lose these differences in float32.
    near = torch.tensor([0.0, 1.0, 5.0, 2.0])[None, None, :, None]
    picked = farthest_first(near + 30_000, torch.ones(1, 1, 4, dtype=torch.bool), 2)
    assert picked[0, 0].tolist() == [0, -1, 1, -1]


def test_keys_of_half_precision_are_compared_in_single():
    keys = torch.tensor([0.0, 300.0, -301.0])[None, None, :, None].half().expand(-1, -1, -1, 64)
    picked = farthest_first(keys, torch.ones(1, 1, 3, dtype=torch.bool), 2)
    assert picked[0, 0].tolist() == [0, -1, 1]


def test_what_flows_on_arrives_at_the_next_pool_with_its_weight():
    keys = whole_keys(1, 2, 30)
    passed = []
    for _, _, rest in folds(KCenter(4), keys, 6):
        held, _ = Recent(100).fold(rest, rest.part(0, 0), BROKEN)
        passed += held.position[0, 0].tolist()
        assert torch.equal(held.b, held.position % 7 * 0.5)
    assert len(passed) == len(set(passed)) == 26


def test_use_is_attention_by_query_and_not_by_age():
    keys = torch.tensor([[0.0], [4.0], [5.0], [1.0]])[None, None]
    slots = slots_at(torch.tensor([[[0, 10, 95, 99]]]), keys.repeat(1, 1, 100, 1)[:, :, :100])
    slots.keys, slots.mass = keys, torch.tensor([[[50.0, 9.0, 1.0, 0.1]]])
    fold = replace(FOLD, seen=torch.tensor([100]))
    for use, second in ((0.0, 95), (1.0, 95), (4.0, 95)):
        kept, _ = KCenter(2, use=use).fold(slots.part(0, 0), slots, fold)
        assert kept.position[0, 0].tolist() == [0, second]
    slots.mass[0, 0] = 1e-5
    assert (KCenter(2, use=10.0)._weight(slots, fold) > 0).all()
    # Token 10 gets 1 per query, and token 95 only 0.2 per query.
    slots.mass[0, 0] = torch.tensor([50.0, 90.0, 1.0, 0.1])
    kept, _ = KCenter(2, use=1.0).fold(slots.part(0, 0), slots, fold)
    assert kept.position[0, 0].tolist() == [0, 10]


def test_a_newer_key_like_a_center_takes_its_place_but_never_the_first_ones():
    keys = torch.tensor([0.0, 100.0, 60.0, 0.5, 99.0, 90.0, 40.0])[None, None, :, None]
    held = slots_at(torch.tensor([[[0, 1, 2]]]), keys)
    new = slots_at(torch.tensor([[[3, 4, 5, 6]]]), keys)
    # The centers are 0, 100 and 60. The key with the largest distance to its center is 40, at 20.
    # Keys within `fresh` times 20 of a center, so 5 or 10, can take its place.
    for fresh, wanted in ((0.0, [0, 1, 2]), (0.25, [0, 2, 4]), (0.5, [0, 2, 5])):
        kept, gone = KCenter(3, fresh=fresh).fold(held, new, FOLD)
        assert kept.position[0, 0].tolist() == wanted
        assert sorted([*wanted, *gone.position[0, 0].tolist()]) == list(range(7))


def test_centers_count_less_from_when_one_had_to_go_but_not_the_first_nor_what_flows_on():
    keys = whole_keys(1, 2, 30)
    made: list[Slots] = []
    pool, fold = KCenter(6, quiet=2.0), replace(FOLD)
    held = slots_at(torch.empty(1, 2, 0, dtype=torch.int64), keys)
    fold = replace(fold, state=pool.state(held))
    for places in ([0, 1, 2], [3, 4, 5], [], [6, 7], [], [8, 9, 10]):
        new = slots_at(torch.tensor(places, dtype=torch.int64).expand(1, 2, -1), keys)
        held, rest = pool.fold(held, new, fold)
        as_it_came = slots_at(rest.position, keys)
        assert torch.equal(rest.a, as_it_came.a)
        assert torch.equal(rest.b, as_it_came.b)
        made.append(held)
    for slots, full in zip(made, (False, False, False, True, True, True), strict=True):
        as_it_came = slots_at(slots.position, keys)
        lower = torch.where(slots.position > 0, 2.0 * full, 0.0)
        assert torch.equal(slots.a, as_it_came.a - lower)
        assert torch.equal(slots.b, as_it_came.b - lower)


def test_of_two_keys_alike_age_says_which_stays_and_far_ones_fade():
    keys = torch.tensor([0.0, 10.0, 30.0, 10.0, 8.0])[None, None, :, None]
    new = slots_at(torch.arange(5)[None, None], keys)
    fold = replace(FOLD, seen=torch.tensor([5]))
    # Ages are 5 to 1. With a half-life of 1, the distance 30 counts as 3.75, the newer key's 10 as
    # 2.5, and 8 as 4.
    for half_life, k, wanted in ((None, 3, [0, 1, 2]), (100, 3, [0, 2, 3]), (1, 2, [0, 4])):
        kept, _ = KCenter(k, half_life=half_life).fold(new.part(0, 0), new, fold)
        assert kept.position[0, 0].tolist() == wanted


def test_a_center_brings_its_neighbors_as_far_as_there_is_room():
    keys = torch.tensor([0.0, 1.0, 2.0, 3.0, 50.0, 4.0, 5.0, 6.0])[None, None, :, None]
    new = slots_at(torch.arange(8)[None, None], keys)
    for k, wanted in ((3, [0, 1, 4]), (4, [0, 1, 3, 4]), (5, [0, 1, 3, 4, 5])):
        kept, _ = KCenter(k, spans=1).fold(new.part(0, 0), new, FOLD)
        assert kept.position[0, 0].tolist() == wanted


# --- through a model


def centers_of(recent: int, k: int, **options):
    """A naive policy: recent tokens, and centers among the tokens that leave them."""
    options["plain"] = lambda t: t.key.tolist()
    pick = kcenter_of(k, lambda t, at: at.rotate(t.key[None], t.position)[0].tolist(), **options)

    def fold(held, new, at):
        newest = [*held[0], *new]
        centers, _ = pick(held[1], newest[:-recent], at)
        return [newest[-recent:], centers]

    return fold


@pytest.mark.parametrize(("positions", "chunk"), [("rolling", 5), ("original", 1)])
def test_a_model_reads_on_as_the_naive_loop_does(llama, ids, positions, chunk):
    tokens = ids(1, 120)
    cache = weir.StreamingCache(llama, "recent(8) | kcenter(6)", chunk=chunk, positions=positions)
    naive = Naive(llama, centers_of(8, 6), pools=2, chunk=chunk, rolling=positions == "rolling")
    got = fed(llama, cache, tokens, [50, 1, 1, 68])[0]
    close_runs(got, naive.feed(tokens[0]), llama)
    holds_as(cache, naive)


def test_centers_make_way_for_keys_that_are_alike_without_rotation(llama):
    # No token occurs twice: rounding would decide which of two equal keys is nearer.
    tokens = torch.randperm(61, generator=torch.Generator().manual_seed(0))[None]
    text = "recent(8) | kcenter(9, spans=1, fresh=0.6)"
    cache = weir.StreamingCache(llama, text, chunk=5)
    naive = Naive(llama, centers_of(8, 9, spans=1, fresh=0.6), pools=2, chunk=5)
    close_runs(fed(llama, cache, tokens, [61])[0], naive.feed(tokens[0]), llama)
    holds_as(cache, naive)


def test_quiet_centers_that_fade_are_read_as_the_naive_loop_reads_them(llama, ids):
    tokens = ids(1, 90)
    options = {"quiet": 1.5, "half_life": 16}
    cache = weir.StreamingCache(llama, "recent(8) | kcenter(6, quiet=1.5, half_life=16)", chunk=5)
    naive = Naive(llama, centers_of(8, 6, **options), pools=2, chunk=5)
    close_runs(fed(llama, cache, tokens, [30, 1, 59])[0], naive.feed(tokens[0]), llama)
    holds_as(cache, naive)


def test_a_whole_prompt_is_compressed_once_as_in_the_paper(llama, ids):
    tokens = ids(1, 90)
    cache = weir.StreamingCache(llama, "kcenter(budget=20)", chunk=4, prefill="full")
    fed(llama, cache, tokens, [90])
    naive = Naive(llama, centers_of(10, 10), pools=2, chunk=4)
    naive.feed(tokens[0], at_once=True)
    holds_as(cache, naive)
    positions = cache.slots(0).position[0]
    held = [sorted(p for p in head.tolist() if p >= 0) for head in positions]
    assert all(head[0] == 0 and head[-10:] == list(range(80, 90)) for head in held)


def test_squared_distances_of_the_reference():
    assert squared_distance([0.0, 3.0], [4.0, 0.0]) == 25.0
