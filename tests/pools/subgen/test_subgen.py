"""SubGen: the samples of the paper's Algorithm 1, their weights, and the claims of both lemmas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from flows import Flow, PoolStream
from hypothesis import given
from hypothesis import strategies as st
from model_runs import fed, holds_as, rows_read_alone
from reference.naive import Naive
from reference.subgen import SubGen as Reference
from roundings import close, close_runs, weights_off, within
from torch import Tensor

import weir
from weir.errors import WeirError
from weir.pools import Fold, SubGen
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams
from weir.slab.slots import Slots

pytestmark = pytest.mark.thinned(3, least=2)

FOLD = Fold(CounterRNG(0), torch.tensor([0]), AttentionParams(1.0))
PURPOSES = {"pair": 0, "sample": 1, "merge": 2}


@dataclass(frozen=True)
class Token:
    """A token of the naive loop."""

    position: int
    key: list[float]
    value: list[float]
    a: float = 0.0
    b: float = 0.0


def weights(position: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-weights a and b for the tokens at these positions."""
    return position % 5 * 0.3, position % 7 * 0.3


def token_of(flow: Flow, row: int, head: int, place: int) -> Token:
    """Return a token of a flow in the form that the naive loop needs."""
    slots = flow.at(torch.full((*flow.keys.shape[:2], 1), place))
    parts = (slots.keys, slots.values, slots.a, slots.b)
    return Token(place, *(t[row, head, 0].tolist() for t in parts))


def lumps(batch: int, heads: int, length: int, seed: int = 0) -> Flow:
    """Return keys in lumps, and values, some of which are zero. Keys are whole numbers, so that
    distances are exact.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).float()

    lump = draw(-40, 40, batch, heads, 9, 3)
    which = draw(0, 9, batch, heads, length).long()[..., None].expand(-1, -1, -1, 3)
    keys = lump.gather(2, which) + draw(-2, 3, batch, heads, length, 3)
    values = draw(-3, 4, batch, heads, length, 2) * (draw(0, 4, batch, heads, length, 1) > 0)
    return Flow(keys, values)


class Stream(PoolStream):
    """A pool that folds a flow, and never has a slot that is empty in all heads and rows."""

    def __iter__(self) -> Iterator[Tensor]:
        for place in super().__iter__():
            assert bool(self.held.held.any(dim=0).any(dim=0).all()), "a column is empty everywhere"
            yield place


def coins(
    draws: CounterRNG, pool: SubGen, head: int, length: int
) -> Callable[[str, int, int], float]:
    """Return a function that gives a head's random numbers, by purpose, position and entry."""
    place = torch.arange(length).expand(1, head + 1, -1)
    entries = {"pair": pool.samples, "sample": pool.per_cluster, "merge": pool.per_cluster}
    table = {
        what: [draws.uniform(n, place, j)[0, head].tolist() for j in range(entries[what])]
        for what, n in PURPOSES.items()
    }
    return lambda what, position, j: table[what][j][position]


def reference_of(pool: SubGen, coin: Callable[[str, int, int], float]) -> Reference:
    """Return the naive loop with a pool's parameters."""
    delta = 0.0 if pool.delta == "auto" else float(pool.delta)
    return Reference(pool.samples, pool.per_cluster, pool.clusters, coin, delta, exact=pool.exact)


def agree(stream: Stream, row: int, head: int, naive: Reference) -> None:
    """Check that the pool holds what the naive loop holds, and that its state is the same."""
    position = stream.held.position[row, head]
    there = position >= 0
    wanted = naive.weights()
    assert position[there].tolist() == list(wanted)
    for place, weights in enumerate((stream.held.a, stream.held.b)):
        mine = weights[row, head].double().exp()
        assert not mine[~there].any()
        other = torch.tensor([pair[place] for pair in wanted.values()], dtype=torch.float64)
        within(mine[there], other, weights_off(50_000) * other)
    state = {name: t[row, head] for name, t in stream.state.items()}
    used = int((state["count"] > 0).sum())
    assert state["delta"].item() == naive.delta
    assert state["born"][:used].tolist() == [c.x.position for c in naive.clusters]
    counts = torch.tensor([c.n for c in naive.clusters], dtype=torch.float64)
    close(state["count"][:used], counts, terms=int(counts.sum()))
    assert state["mu"].item() == pytest.approx(naive.mu)
    if not naive.exact:
        samples = [[t.position for t in c.samples] for c in naive.clusters]
        assert position[state["samples"][:used]].tolist() == samples


BOUNDED = SubGen(samples=6, clusters=5, per_cluster=3)
UNBOUNDED = SubGen(samples=6, clusters=None, per_cluster=3, delta=7.0)


@pytest.mark.parametrize(
    ("pool", "chunk", "length", "share", "weighted"),
    [
        (BOUNDED, 1, 400, 1.0, False),
        (BOUNDED, 64, 1000, 1.0, False),
        (BOUNDED, 100, 1000, 0.5, True),
        (SubGen(4, 7, 2, delta=3.0), 7, 600, 0.7, False),
        (SubGen(1, 1, 1), 5, 100, 1.0, False),
        (SubGen(6, 5, 3, exact=False), 7, 600, 1.0, True),
        (UNBOUNDED, 1, 200, 1.0, False),
        (UNBOUNDED, 64, 700, 0.6, False),
        (SubGen(3, None, 2, delta=2.0, exact=False), 9, 300, 1.0, True),
    ],
)
def test_it_holds_what_a_naive_loop_holds(pool, chunk, length, share, weighted):
    flow = lumps(2, 2, length)
    flow.weights = weights if weighted else None
    stream = Stream(pool, flow, chunk, share, CounterRNG(3))
    naive = {
        (row, head): reference_of(pool, coins(stream.draws, pool, head, length))
        for row, head in itertools.product(range(2), range(2))
    }
    for row, head, loop in stream.beside(naive, Token):
        agree(stream, row, head, loop)
    if pool.clusters and pool.clusters > 1:
        assert all(loop.merges for loop in naive.values())
    if pool.clusters is None:
        assert len(naive[0, 0].clusters) > 3


@pytest.mark.parametrize("pool", [BOUNDED, UNBOUNDED, replace(BOUNDED, exact=False)])
@pytest.mark.thinned(3)
def test_it_does_not_matter_how_the_stream_was_cut(pool):
    flow = lumps(1, 3, 300)
    one, *others = (Stream(pool, flow, chunk).whole() for chunk in (1, 7, 64, 300))
    for other in others:
        for name, t in one.held.tensors().items():
            there = one.held.held if t.ndim == 3 else one.held.held[..., None]
            assert torch.equal(t.where(there, 0), other.held.tensors()[name].where(there, 0)), name
        assert torch.equal(one.held.position, other.held.position)
        for name, t in one.state.items():
            assert torch.equal(t, other.state[name]), name


small = st.integers(-6, 6)
tokens_of_a_stream = st.lists(
    st.tuples(st.tuples(small, small), st.tuples(small, small)), min_size=1, max_size=40
)


@given(
    tokens_of_a_stream,
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(1, 4)),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 41),
)
def test_the_invariants_of_both_lemmas_hold(tokens, s, m, t, delta, chunk):
    keys, values = (torch.tensor([x[i] for x in tokens]).float()[None, None] for i in (0, 1))
    flow = Flow(keys, values)
    pool = SubGen(s, m, t, float(delta), exact=False)
    stream = Stream(pool, flow, chunk)
    naive = reference_of(pool, coins(stream.draws, pool, 0, len(tokens)))
    seen = 0
    for arrivals in stream:
        for _ in range(arrivals.shape[2]):
            naive.take(token_of(flow, 0, 0, seen))
            seen += 1
        agree(stream, 0, 0, naive)
        state = {name: x[0, 0] for name, x in stream.state.items()}
        used = int((state["count"] > 0).sum())
        # Lemma 1: mu is the sum of squared lengths of values, and the samples M are drawn from
        # tokens whose values are not zero.
        lengths = values[0, 0, :seen].double().square().sum(dim=1)
        assert state["mu"] == lengths.sum()
        drawn = state["pairs"][state["pairs"] >= 0]
        assert len(drawn) == (s if lengths.any() else 0)
        assert lengths[stream.held.position[0, 0][drawn]].all()
        # Lemma 2: clusters are a partition of the keys. Centers are far apart, keys are near the
        # center of their cluster, and the samples of a cluster come from it.
        wide = state["delta"].item()
        assert state["count"].sum() == seen
        assert m is None or used <= m
        members = sorted(x.position for c in naive.clusters for x in c.members)
        assert members == list(range(seen))
        reach = wide if m is None else 2 * wide
        for i, cluster in enumerate(naive.clusters):
            center = state["centre"][i].tolist()
            assert len(cluster.members) == state["count"][i]
            assert cluster.x in cluster.members
            assert all(math.dist(center, x.key) <= reach for x in cluster.members)
            mine = {x.position for x in cluster.members}
            assert set(stream.held.position[0, 0][state["samples"][i]].tolist()) <= mine
        for one, other in itertools.combinations(state["centre"][:used].tolist(), 2):
            assert math.dist(one, other) > wide


# --- both sums are unbiased: each of many heads is a stream of its own over the same tokens

RUNS = 3000
QUERY = torch.tensor([0.6, -0.4], dtype=torch.float64)


def same_tokens_for_all(length: int) -> Flow:
    """Return keys in lumps of different sizes, most of which appear late, and values of different
    lengths. All heads have the same.
    """
    generator = torch.Generator().manual_seed(5)
    lump = torch.tensor([[0.0, 0.0], [2.0, 1.0], [-1.0, 2.0], [1.0, -3.0]])
    which = torch.multinomial(
        torch.tensor([8.0, 4.0, 2.0, 1.0]), length, replacement=True, generator=generator
    )
    which[:24] = 0
    keys = lump[which] + torch.randn(length, 2, generator=generator) * 0.5
    values = 1 + torch.randn(length, 3, generator=generator) * torch.rand(
        length, 1, generator=generator
    )
    return Flow(keys.expand(1, RUNS, -1, -1), values.expand(1, RUNS, -1, -1))


def estimates(held: Slots) -> tuple[Tensor, Tensor]:
    """Return numerators [runs, value_dim] and denominators [runs] of attention for the query."""
    held = held.map(lambda t: t[0].double() if t.is_floating_point() else t[0])
    logits = held.keys @ QUERY
    above = (logits + held.a).exp()[..., None] * held.values
    return above.sum(dim=1), (logits + held.b).exp().sum(dim=1)


def truth(flow: Flow, seen: int, pool: SubGen) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both exact sums, each followed by the variance of Algorithm 1's estimate of it."""
    keys, values = flow.keys[0, 0, :seen].double(), flow.values[0, 0, :seen].double()
    e = (keys @ QUERY).exp()
    lengths = values.square().sum(dim=1)
    each = (lengths.sum() / lengths * e)[:, None] * values
    chance = (lengths / lengths.sum())[:, None]
    above = (e[:, None] * values).sum(dim=0)
    above_var = ((chance * each.square()).sum(dim=0) - above.square()) / pool.samples
    naive = reference_of(pool, lambda *_: 0.5)
    for place in range(seen):
        naive.take(Token(place, keys[place].tolist(), values[place].tolist()))
    below_var = torch.zeros((), dtype=torch.float64)
    for cluster in naive.clusters:
        mine = e[[x.position for x in cluster.members]]
        below_var += cluster.n**2 * mine.var(correction=0) / pool.per_cluster
    return above, above_var, e.sum(), below_var


@pytest.mark.parametrize(
    "pool",
    [
        SubGen(samples=3, clusters=None, per_cluster=2, delta=1.5, exact=False),
        SubGen(samples=3, clusters=3, per_cluster=2, delta=0.2, exact=False),
        SubGen(samples=3, clusters=4, per_cluster=2),
    ],
    ids=["unbounded", "bounded", "after an exact phase"],
)
def test_both_sums_are_unbiased_before_and_after_merges(pool):
    flow = same_tokens_for_all(60)
    stream = Stream(pool, flow, 12, draws=CounterRNG(11))
    widths = []
    for arrivals in stream:
        seen = int(arrivals[0, 0, -1]) + 1
        widths.append(stream.state["delta"][0, 0].item())
        above, above_var, below, below_var = truth(flow, seen, pool)
        mine, mine_below = estimates(stream.held)
        if bool(stream.state["still"].all()):
            close(mine, above.expand_as(mine), terms=seen)
            continue
        # Five standard deviations of the mean, for sums that are right on average.
        assert ((mine.mean(dim=0) - above).abs() < 5 * (above_var / RUNS).sqrt()).all()
        assert (mine_below.mean() - below).abs() < 5 * (below_var / RUNS).sqrt() + weights_off(
            seen
        ) * below
        # The variance is that of independent draws.
        assert ((mine.var(dim=0) / above_var - 1).abs() < 0.2).all()
        assert (mine_below.var() / below_var - 1).abs() < 0.2
    if pool.clusters:
        assert widths[-1] > widths[0], "no merge happened"


def test_the_numerators_error_falls_with_the_root_of_the_samples():
    flow = same_tokens_for_all(40)
    errors = []
    for s in (2, 8, 32):
        pool = SubGen(s, None, 1, 1.5, exact=False)
        above, *_ = truth(flow, 40, pool)
        mine, _ = estimates(Stream(pool, flow, 40).whole().held)
        errors.append((mine - above).square().sum(dim=1).mean().sqrt())
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.07)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.07)


@pytest.mark.parametrize("clusters", [None, 3])
def test_the_denominators_error_falls_with_the_root_of_the_samples_of_a_cluster(clusters):
    flow = same_tokens_for_all(40)
    errors = []
    for t in (1, 4, 16):
        pool = SubGen(1, clusters, t, 1.0, exact=False)
        _, _, below, _ = truth(flow, 40, pool)
        _, mine = estimates(Stream(pool, flow, 40).whole().held)
        errors.append((mine - below).square().mean().sqrt())
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.07)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.07)


# --- what is unusual


def test_while_all_tokens_fit_they_are_kept_as_they_are():
    flow = lumps(1, 2, 21 + 1)
    flow.weights = weights
    stream = Stream(BOUNDED, flow, 1)
    for arrivals in stream:
        seen = int(arrivals[0, 0, 0]) + 1
        whole = flow.at(torch.arange(seen).expand(1, 2, -1))
        kept = seen <= BOUNDED.slots()
        assert torch.equal(stream.held.position, whole.position) == kept
        if kept:
            assert torch.equal(stream.held.a, whole.a)
            assert torch.equal(stream.held.b, whole.b)


def test_equal_keys_are_one_cluster_and_one_sum():
    flow = Flow(torch.ones(1, 1, 50, 3), torch.ones(1, 1, 50, 1))
    stream = Stream(BOUNDED, flow, 8).whole()
    assert stream.state["count"][0, 0].tolist() == [50, 0, 0, 0, 0]
    for weights in (stream.held.a, stream.held.b):
        assert weights.exp().sum().item() == pytest.approx(50, rel=weights_off(50))


def test_values_of_zero_add_nothing_to_the_numerator():
    flow = lumps(1, 1, 60)
    flow.values = torch.zeros_like(flow.values)
    stream = Stream(BOUNDED, flow, 8).whole()
    assert stream.held.a.isneginf().all()
    assert stream.held.b.exp().sum().item() == pytest.approx(60, rel=weights_off(60))


def test_a_distance_to_begin_with_is_the_smallest_among_one_more_key_than_clusters():
    keys = torch.tensor([0.0, 50.0, 50.0, 20.0, 90.0])[None, None, :, None]
    stream = Stream(SubGen(1, 3, 1), Flow(keys, torch.ones_like(keys)), 1)
    widths = [stream.state["delta"].item() for _ in stream]
    # With 90, there are four different keys, one more than clusters. The two nearest are 0 and 20.
    assert widths == [0, 0, 0, 0, 20]
    assert stream.state["count"].tolist() == [[[2, 2, 1]]]
    assert stream.state["born"].tolist() == [[[0, 1, 4]]]


def test_clusters_do_not_merge_in_chains():
    keys = torch.tensor([0.0, 10.0, 20.0, 90.0])[None, None, :, None]
    stream = Stream(SubGen(1, 3, 1), Flow(keys, torch.ones_like(keys)), 4).whole()
    # 10 joins the cluster of 0. 20 is near 10, but 10 is no longer a center.
    assert stream.state["born"].tolist() == [[[0, 2, 3]]]
    assert stream.state["count"].tolist() == [[[2, 1, 1]]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_key_that_is_no_number_is_refused_and_changes_nothing(bad):
    stream = Stream(BOUNDED, lumps(1, 1, 40), 8).whole()
    state = dict(stream.state)
    new = stream.flow.at(torch.arange(8)[None, None])
    new.keys[0, 0, 3, 1] = bad
    with pytest.raises(WeirError, match="not finite"):
        BOUNDED.fold(stream.held, new, replace(FOLD, state=state))
    assert all(state[name] is t for name, t in stream.state.items())


# --- through a model

SMALL = "sink(2) | recent(6) | subgen(samples=6, clusters=4, per_cluster=2)"
OPEN = "sink(2) | recent(6) | subgen(samples=6, clusters=none, per_cluster=2, delta=1.5)"


def naive_pipe(pool: SubGen, length: int) -> Callable[..., Any]:
    """Return the naive form of a pipe of two sinks, six recent tokens and the pool."""
    loops: dict[tuple[int, int], Reference] = {}

    def fold(held: Any, new: Any, at: Any) -> Any:
        place = (at.layer, at.head)
        if place not in loops:
            draws = CounterRNG(0, layer=at.layer, pool=2)
            loops[place] = reference_of(pool, coins(draws, pool, at.head, length))
        sinks, recent, middle = held
        line = [*recent, *new]
        while line and len(sinks) < 2:
            sinks = [*sinks, line.pop(0)]
        leaving, line = line[: max(0, len(line) - 6)], line[-6:]
        for t in leaving:
            key = at.rotate(t.key[None], t.position)[0].tolist()
            loops[place].take(Token(t.position, key, t.value.tolist()))
        known = {t.position: t for t in [*middle, *leaving]}
        kept = []
        for position, (above, below) in loops[place].weights().items():
            token = known[position]
            token.a, token.b = (math.log(w) if w else -math.inf for w in (above, below))
            kept.append(token)
        return [sinks, line, kept]

    return fold


@pytest.mark.parametrize(("positions", "chunk"), [("rolling", 5), ("original", 1)])
@pytest.mark.parametrize("text", [SMALL, OPEN])
def test_a_model_reads_on_as_the_naive_loop_does(llama, ids, text, positions, chunk):
    tokens = ids(1, 100)
    cache = weir.StreamingCache(llama, text, chunk=chunk, positions=positions)
    fold = naive_pipe(weir.policy(text).pools[2], 100)
    naive = Naive(llama, fold, pools=3, chunk=chunk, rolling=positions == "rolling")
    got = fed(llama, cache, tokens, [50, 1, 1, 48])[0]
    close_runs(got, naive.feed(tokens[0]), llama)
    holds_as(cache, naive)


def test_a_whole_prompt_at_once_is_sampled_as_one_that_came_in_chunks(llama, ids):
    tokens = ids(1, 150)
    slots = []
    for prefill in ("chunked", "full"):
        cache = weir.StreamingCache(llama, SMALL, chunk=5, prefill=prefill)
        fed(llama, cache, tokens, [150])
        slots.append(cache.slots(0))
    one, other = slots
    assert torch.equal(one.position, other.position)
    close_runs(one.a, other.a, llama)
    close_runs(one.b, other.b, llama)


@pytest.mark.slow
def test_rows_of_a_stream_without_a_limit_grow_apart(llama, ids):
    # One row repeats the same token, and the other gets new keys all the time.
    tokens = ids(2, 200)
    tokens[0] = 7
    text = "recent(4) | subgen(samples=2, clusters=none, per_cluster=1, delta=0.5)"
    rows_read_alone(llama, text, tokens, [0, 2], [90, 110], chunk=4)
    stream = weir.Stream(llama, text, chunk=4)
    stream.feed(tokens)
    assert stream.slots(0).position.shape[2] > 20
