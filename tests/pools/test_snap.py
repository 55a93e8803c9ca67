"""SnapKV: the last queries vote on which tokens stay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runs import reads_as
from reference.snap import pooled_at, snap_of
from roundings import close, off, softmax_off, within
from torch import Tensor

import weir
from weir.cache.layer.layer import Layer
from weir.cache.layer.layer_state import LayerSpec
from weir.cache.plan import plan_forward
from weir.policies.pipe import Pipe
from weir.pools import Fold, ObservedAttention, Recent, Sink, Snap
from weir.pools.counter_rng import CounterRNG
from weir.pools.ranked import pool_neighbors
from weir.slab.attention import AttentionParams
from weir.slab.positions import Alibi, LayerPositions
from weir.slab.slots import Slots

HEADS, GROUP, DIM = 2, 2, 4
SCALE = 0.5
VOTES_OFF = softmax_off(DIM, 20)
"""The largest relative error of a score by rounding. No query or key is longer than 6.3."""


@dataclass
class Token:
    """A token of the naive loop."""

    position: int


@dataclass
class At:
    """Where and when the naive loop folds; the queries of one row and head, by place."""

    row: int
    head: int
    seen: int
    queries: Any
    others: list = field(default_factory=list)


def others_of(at: Any) -> list:
    """What the pools in front of the naive one hold."""
    return at.others


@dataclass
class Stream:
    """One layer that reads random queries and keys; row `r` begins `r * lag` columns late."""

    pipe: Pipe
    chunk: int
    length: int
    batch: int = 1
    lag: int = 0
    form: AttentionParams = field(default_factory=lambda: AttentionParams(SCALE))
    place: LayerPositions = field(default_factory=LayerPositions)
    full: int = 0
    origin: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        shape = (self.batch, HEADS * GROUP, self.length + self.batch * self.lag, DIM)
        self.queries = 1.5 * torch.randn(shape, generator=generator)
        self.keys = 1.5 * torch.randn(self.batch, HEADS, *shape[2:], generator=generator)
        self.layer = Layer(LayerSpec(self.pipe, self.place, self.chunk))
        self.seen, self.waiting, self.at = [0] * self.batch, [0] * self.batch, 0

    def read(self, columns: int) -> None:
        """Feed the next columns. A row that begins later has no token in some of them."""
        part = slice(self.at, self.at + columns)
        begins = torch.arange(self.batch) * self.lag
        real = torch.arange(self.at, self.at + columns) >= begins[:, None]
        plan = plan_forward(
            real,
            self.batch,
            columns,
            self.seen,
            self.waiting,
            self.chunk,
            real.device,
            prefill=bool(self.full) and self.at == 0,
            origin=self.origin,
        )
        q, k = self.queries[:, :, part], self.keys[:, :, part]
        self.layer.attend(q, k, k, self.form, plan)
        self.layer.commit()
        self.at += columns
        self.seen, self.waiting = plan.after(self.seen, self.waiting)

    def places(self, row: int, head: int, pool: int) -> list[int]:
        """The tokens of one pool, counted from the first of the stream."""
        lengths, start = self.layer.state.lengths[row], 0
        for index in (*self.pipe.front, *self.pipe.run):
            if index == pool:
                break
            start += lengths[index]
        position = self.layer.state.slab.position[row, head, start : start + lengths[pool]]
        return [p - self.origin for p in position.tolist() if p >= 0]

    def own(self, row: int, head: int) -> tuple[list, list]:
        """The queries and keys of one row and head, by place in its stream."""
        begin, group = row * self.lag, slice(head * GROUP, (head + 1) * GROUP)
        mine = self.queries[row, group, begin:].double().transpose(0, 1)
        return mine.tolist(), self.keys[row, head, begin:].double().tolist()


def logits_with(keys: dict, softcap: float | None = None, slopes: Any = None) -> Any:
    """The logits of a group's queries for a token, from the keys of each (row, head)."""

    def logits_of(at: At, place: int, token: Token, queries: list) -> list[float]:
        key, out = keys[at.row, at.head][token.said], []
        for number, query in enumerate(queries):
            x = sum(a * b for a, b in zip(query, key, strict=True)) * SCALE
            x = x if softcap is None else math.tanh(x / softcap) * softcap
            slope = 0.0 if slopes is None else slopes[at.head * GROUP + number]
            out.append(x - slope * (place - token.position))
        return out

    return logits_of


def check_against(
    stream: Stream, naive: Any, queries: dict, columns: list[int], front: list[Callable]
) -> int:
    """Read on, and compare the last pool after every fold with the naive one.

    If scores differ only by rounding, and the pool and the naive loop choose different tokens, the
    naive loop goes on with those that the pool chose. Returns how often this happened.
    """
    last, excused = len(stream.pipe.pools) - 1, 0
    lists = {at: [[] for _ in stream.pipe.pools] for at in queries}
    folded = dict.fromkeys(queries, 0)
    for width in columns:
        stream.read(width)
        for (row, head), pools in lists.items():
            upto = stream.seen[row] - stream.waiting[row]
            if upto == folded[row, head]:
                continue
            new = [Token(p) for p in range(folded[row, head], upto)]
            folded[row, head] = upto
            at = At(row, head, upto, queries[row, head])
            for index, fold in enumerate(front):
                pools[index], new = fold(pools[index], new)
                assert stream.places(row, head, index) == [t.position for t in pools[index]]
                at.others.extend(pools[index])
            everyone = [*pools[last], *new]
            pools[last], _ = naive(pools[last], new, at)
            found = stream.places(row, head, last)
            if found != [t.position for t in pools[last]]:
                score = {p: s[0] for p, s in naive.scores(everyone, at).items()}
                lowest = min(score[p] for p in found)
                highest = max(s for p, s in score.items() if p not in found)
                assert len(found) == len(pools[last])
                assert lowest >= highest * (1 - VOTES_OFF)
                pools[last] = [Token(p) for p in found]
                excused += 1
    return excused


def sink(n: int) -> Callable:
    return lambda mine, new: (mine + new[: n - len(mine)], new[n - len(mine) :])


def recent(n: int) -> Callable:
    return lambda mine, new: ((mine + new)[-n:], (mine + new)[:-n])


ALONE: tuple = ((), [])
BEHIND = ((Sink(2), Recent(5)), [sink(2), recent(5)])
PARTLY = ((Recent(2),), [recent(2)])


@pytest.mark.parametrize("frame", ["read", "stream"])
@pytest.mark.parametrize(
    ("chunk", "length", "snap", "before"),
    [
        (1, 200, Snap(12, window=3, kernel=5), ALONE),
        (7, 400, Snap(16, window=4, kernel=7, average=True), ALONE),
        (64, 700, Snap(24, window=16, kernel=5), ALONE),
        (5, 300, Snap(9, window=5, kernel=3), BEHIND),
        (5, 300, Snap(9, window=5, kernel=3, average=True), PARTLY),
        (16, 400, Snap(9, window=1, kernel=1), ALONE),
    ],
)
def test_it_holds_what_a_naive_loop_holds_in_every_row_and_head(chunk, length, snap, before, frame):
    pools, front = before
    snap = replace(snap, frame=frame)
    batch = 1 if chunk == 1 else 3
    stream = Stream(Pipe((*pools, snap)), chunk, length, batch=batch, lag=chunk + 3)
    own = {(row, head): stream.own(row, head) for row in range(batch) for head in range(HEADS)}
    naive = snap_of(
        snap.budget,
        snap.window,
        snap.kernel,
        snap.average,
        logits_of=logits_with({at: keys for at, (_, keys) in own.items()}),
        others_of=others_of if frame == "read" else None,
    )
    queries = {at: q for at, (q, _) in own.items()}
    # A call has at most a chunk of tokens, so that no row folds twice between two comparisons.
    columns = [1 + n * 11 % chunk for n in range(2 * length // (chunk + 1))]
    assert sum(columns) + batch * (chunk + 3) >= length
    assert check_against(stream, naive, queries, columns, front) <= 3


@pytest.mark.parametrize("frame", ["read", "stream"])
def test_votes_are_the_attention_of_the_layer_with_its_capping_and_its_biases(frame):
    slopes = [0.4, 0.1, 0.02, 0.3]
    stream = Stream(
        Pipe((Snap(12, window=4, kernel=3, frame=frame),)),
        chunk=6,
        length=600,
        form=AttentionParams(SCALE, softcap=1.5),
        place=LayerPositions(alibi=Alibi(torch.tensor(slopes))),
    )
    own = {(0, head): stream.own(0, head) for head in range(HEADS)}
    logits_of = logits_with({at: k for at, (_, k) in own.items()}, 1.5, slopes)
    others = others_of if frame == "read" else None
    naive = snap_of(12, 4, 3, logits_of=logits_of, others_of=others)
    queries = {at: q for at, (q, _) in own.items()}
    assert check_against(stream, naive, queries, [6] * 100, []) <= 2


def test_the_place_of_the_first_token_changes_nothing():
    streams = [
        Stream(Pipe((Snap(12, window=4, kernel=3),)), 6, 120, origin=origin)
        for origin in (0, 1_000_000)
    ]
    for stream in streams:
        stream.read(120)
    for head in range(HEADS):
        first, second = (stream.places(0, head, 0) for stream in streams)
        assert first == second


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("kernel", [1, 5, 7])
def test_a_whole_prompt_keeps_what_the_papers_listing_keeps(kernel, average):
    budget, window, n = 40, 8, 300
    pipe = Pipe((Snap(budget, window, kernel, average),))
    stream = Stream(pipe, chunk=16, length=n, full=n)
    stream.read(n)
    q = stream.queries.double().unflatten(1, (HEADS, GROUP))[..., -window:, :]
    logits = torch.einsum("bhgld,bhnd->bhgln", q, stream.keys.double()) * SCALE
    ahead = torch.arange(n) > torch.arange(n - window, n)[:, None]
    shares = logits.masked_fill(ahead, -torch.inf).softmax(dim=-1)[..., : n - window]
    votes = shares.sum(dim=(2, 3))
    pool1d = F.avg_pool1d if average else F.max_pool1d
    scores = pool1d(votes, kernel, stride=1, padding=kernel // 2)[0]
    for head in range(HEADS):
        found = stream.places(0, head, 0)
        assert found[-window:] == list(range(n - window, n))
        chosen = found[:-window]
        assert len(chosen) == budget - window
        # The chosen tokens have the highest scores. Which of several equal ones stays is undefined
        # in the listing.
        wanted = scores[head].topk(budget - window).values
        within(scores[head][chosen].sort(descending=True).values, wanted, VOTES_OFF * wanted)


# --- one fold


def one_fold(seen: int, queries: Tensor, **more: Any) -> Fold:
    return Fold(CounterRNG(0), torch.tensor([seen]), AttentionParams(1.0), queries=queries, **more)


def reading(slots: Slots, fold: Fold) -> Fold:
    """The fold of a layer that holds only these slots, at their places in the stream."""
    nowhere = slots.position[:, :, :0]
    read = ObservedAttention(
        lambda: slots, lambda: nowhere, fold.queries, fold.next, fold.form, LayerPositions()
    )
    return replace(fold, read=read)


def tokens(keys: Tensor, places: list[int] | None = None) -> Slots:
    """Tokens with the keys [n, dim] in one row and head; their values say which they are."""
    position = torch.tensor([[places if places is not None else list(range(len(keys)))]])
    weights = torch.zeros(position.shape).masked_fill(position < 0, -torch.inf)
    values = position[..., None].float()
    return Slots(keys[None, None], values, weights, weights.clone(), position)


NONE = tokens(torch.zeros(0, 1))


def kept(pool: Snap, slots: Slots, fold: Fold) -> list[int]:
    stays, gone = pool.fold(slots.part(0, 0), slots, reading(slots, fold))
    places, rest = stays.position[0, 0].tolist(), gone.position[0, 0].tolist()
    assert stays.values[0, 0, :, 0].tolist() == places
    assert gone.values[0, 0, :, 0].tolist() == rest
    assert sorted(places + rest) == sorted(p for p in slots.position[0, 0].tolist() if p >= 0)
    assert places == sorted(places)
    assert rest == sorted(rest)
    return places


def test_votes_of_the_query_heads_of_a_group_are_summed():
    # Head 0 wants token 1 (0.6 to 0.4), head 1 wants token 0 (0.9 to 0.1): together 0 wins.
    keys = torch.tensor([[1.0], [0.0], [-50.0]])
    wishes = torch.tensor([math.log(0.4 / 0.6), math.log(0.9 / 0.1)])
    queries = wishes.view(1, 1, 2, 1, 1)
    snap = Snap(2, window=1, kernel=1)
    assert kept(snap, tokens(keys), one_fold(3, queries)) == [0, 2]
    assert kept(snap, tokens(keys), one_fold(3, queries[:, :, :1])) == [1, 2]


def test_a_token_that_stands_for_several_receives_the_votes_of_all():
    keys = torch.tensor([[0.2], [0.0], [-50.0]])
    snap, fold = Snap(2, window=1, kernel=1), one_fold(3, torch.ones(1, 1, 1, 1, 1))
    slots = tokens(keys)
    assert kept(snap, slots, fold) == [0, 2]
    heavier = replace(slots, a=torch.tensor([[[0.0, 0.4, 0.0]]]), b=torch.tensor([[[0.0, 0.4, 0]]]))
    assert kept(snap, heavier, fold) == [1, 2]
    stays, _ = snap.fold(heavier.part(0, 0), heavier, reading(heavier, fold))
    assert stays.a.tolist() == stays.b.tolist() == [[[pytest.approx(0.4, rel=off()), 0.0]]]


def test_a_wanted_token_brings_its_surroundings_and_comes_first_itself():
    keys = torch.zeros(20, 1)
    keys[8] = 9.0
    fold = one_fold(20, torch.ones(1, 1, 1, 1, 1))
    assert kept(Snap(6, window=1, kernel=5), tokens(keys), fold) == [6, 7, 8, 9, 10, 19]
    # Of equal neighbors, the older ones stay. The wanted token itself stays in any case.
    assert kept(Snap(3, window=1, kernel=5), tokens(keys), fold) == [6, 8, 19]


def test_votes_for_the_window_lift_none_of_its_neighbors():
    keys = torch.tensor([[0.0], [2.0], [0.0], [0.0], [9.0], [0.0]])
    fold = one_fold(6, torch.ones(1, 1, 1, 1, 1))
    assert kept(Snap(3, window=2, kernel=3), tokens(keys), fold) == [1, 4, 5]


def test_neighbors_are_neighbors_in_the_stream_and_not_in_the_cache():
    places = [0, 10, 11, 12, 30, 31]
    keys = torch.tensor([[0.0], [0.0], [9.0], [0.0], [8.0], [0.0]])
    fold = one_fold(32, torch.ones(1, 1, 1, 1, 1))
    assert kept(Snap(5, window=1, kernel=3), tokens(keys, places), fold) == [10, 11, 12, 30, 31]
    assert kept(Snap(4, window=1, kernel=3), tokens(keys, places), fold) == [10, 11, 12, 31]


def test_a_query_has_no_vote_for_what_came_after_it():
    # The query of token 2 gives nearly all of its attention to token 0. If it could attend to token
    # 3, this would get it instead, and token 0 would have less than the third that token 1 gets
    # from each of the two later queries.
    keys = torch.tensor([[20.0, 0.0], [0.0, 0.4], [0.0, 0.0], [200.0, 0.0], [0.0, 0.0]])
    queries = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])[None, None, None]
    assert kept(Snap(4, window=3, kernel=1), tokens(keys), one_fold(5, queries)) == [0, 2, 3, 4]


def test_all_equal_keys_keep_the_oldest_and_the_window():
    fold = one_fold(30, torch.ones(1, 1, 1, 4, 1))
    assert kept(Snap(9, window=4, kernel=1), tokens(torch.ones(30, 1)), fold) == [
        *range(5),
        *range(26, 30),
    ]


def test_arrivals_in_disorder_and_holes_are_put_in_order():
    keys = torch.tensor([[0.0], [9.0], [0.0], [0.0], [5.0]])
    slots = tokens(keys, [9, 4, -1, 12, 2])
    fold = one_fold(13, torch.ones(1, 1, 1, 1, 1), unbroken=False)
    assert kept(Snap(3, window=1, kernel=1), slots, fold) == [2, 4, 12]


@given(st.data())
def test_pooling_is_over_places_of_the_stream(data):
    places = sorted(data.draw(st.sets(st.integers(0, 40), min_size=1, max_size=14)))
    votes = [data.draw(st.integers(0, 64)) / 64 for _ in places]
    slots = data.draw(st.permutations([-1] * data.draw(st.integers(0, 3)) + [0] * len(places)))
    at = [index for index, slot in enumerate(slots) if slot == 0]
    filled = torch.zeros(2, len(slots))
    filled[1] = -1
    filled[:, at] = torch.tensor([votes, [float(place) for place in places]])
    kernel, average = data.draw(st.sampled_from([1, 3, 5, 7, 9])), data.draw(st.booleans())
    found = pool_neighbors(
        filled[0][None, None], filled[1].long()[None, None], kernel, average=average
    )[0, 0, at]
    by_place = dict(zip(places, votes, strict=True))
    wanted = [pooled_at(place, by_place, kernel, average) for place in places]
    close(found, torch.tensor(wanted, dtype=torch.float64), terms=kernel)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 12), st.sampled_from([1, 3, 7]), st.integers(0, 9))
@pytest.mark.slow
def test_the_window_always_stays_and_nothing_is_lost_below_the_budget(window, room, kernel, seed):
    snap = Snap(window + room, window, kernel)
    stream = Stream(Pipe((snap,)), chunk=1 + seed % 5, length=60)
    stream.queries = stream.queries.roll(seed, dims=2)
    while stream.at < 60:
        stream.read(1)
        upto = stream.seen[0] - stream.waiting[0]
        for head in range(HEADS):
            found = stream.places(0, head, 0)
            assert len(found) == min(upto, snap.slots())
            assert set(range(max(0, upto - window), upto)) <= set(found)


# --- through a model

SMALL = "snapkv(budget=24, window=6, kernel=5)"


@pytest.mark.parametrize(
    ("positions", "chunk", "whole", "frame"),
    [
        pytest.param("rolling", 1, 0, "stream", marks=pytest.mark.slow),
        pytest.param("rolling", 5, 0, "read", marks=pytest.mark.slow),
        ("original", 5, 0, "stream"),
        ("rolling", 5, 60, "read"),
    ],
)
def test_a_model_reads_as_with_naive_pools(
    llama, ids, naive, twins, positions, chunk, whole, frame
):
    def logits_of(at, place, token, queries):
        key = at.rotate(token.key[None], [token.position])[0]
        return (queries @ key * llama.model.layers[at.layer].self_attn.scaling).tolist()

    others = (lambda at: []) if frame == "read" else None
    fold = twins.pipe(snap_of(16, 4, 5, logits_of=logits_of, others_of=others))
    twin = naive(llama, fold, 1, chunk, positions == "rolling")
    prefill = "full" if whole else "chunked"
    policy = f"snap(16, 4, 5, frame={frame})"
    stream = weir.Stream(llama, policy, chunk=chunk, positions=positions, prefill=prefill)
    reads_as(stream, twin, ids(1, 150), whole)


def test_the_named_policy_holds_its_budget_and_no_more():
    made = weir.policy("snapkv(budget=100)")
    assert made.slots == 100
    assert made.pools == (Snap(100, window=32, kernel=7),)
    assert weir.policy("snapkv").slots == 256


def test_a_window_that_others_hold_needs_no_room():
    assert weir.policy("sink(4) | recent(32) | snap(1)").slots == 37
    assert weir.policy("recent(30) | snap(3)").slots == 33
