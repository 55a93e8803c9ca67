"""BalanceKV: the pool holds what Algorithms 1, 2 and 4 hold, in a fixed number of slots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flows import Flow, PoolStream
from hypothesis import given
from hypothesis import strategies as st
from model_runs import fed, holds_as
from reference import balance as naive_file
from reference.balance import Balance as Reference
from reference.balance import SoftmaxBalance, Token
from roundings import close, close_runs, largest, weights_off, within
from torch import Tensor

import weir
from weir.errors import WeirError
from weir.pools import Balance, Fold
from weir.pools.balance import balance as pool_file
from weir.pools.balance import merge_reduce, schedule
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams

pytestmark = pytest.mark.thinned(3, least=2)

FOLD = Fold(CounterRNG(0), torch.tensor([0]), AttentionParams(0.5))


def weights(position: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-weights a and b for the tokens at these positions."""
    return position // 16 % 3 * 0.5, position // 32 % 3 * 0.5


def lumps(batch: int, heads: int, length: int, seed: int = 0) -> Flow:
    """Keys in lumps; values of very different lengths, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    lump = torch.randn(batch, heads, 5, 3, generator=generator) * 2
    which = torch.randint(0, 5, (batch, heads, length, 1), generator=generator)
    keys = lump.gather(2, which.expand(-1, -1, -1, 3))
    keys = keys + torch.randn(keys.shape, generator=generator) / 2 + 1
    values = torch.randn(batch, heads, length, 2, generator=generator)
    values = values * 2.0 ** torch.randint(-4, 3, (batch, heads, length, 1), generator=generator)
    return Flow(keys, values * (torch.rand(values.shape[:3], generator=generator) > 0.1)[..., None])


@dataclass
class Stream(PoolStream):
    """A pool that folds a flow, with the scale of attention that the naive loop uses."""

    form: AttentionParams = FOLD.form


def coins(draws: CounterRNG, head: int, length: int) -> tuple[Any, Any]:
    """Return two functions that give a head's random numbers, by level, position and block: one for
    the first set of tokens, and one for the other sets.
    """
    place = torch.arange(length).expand(1, head + 1, -1)
    tables: dict[tuple[int, int], list[float]] = {}

    def coin(purpose: int, position: int, block: int) -> float:
        if (purpose, block) not in tables:
            tables[purpose, block] = draws.uniform(purpose, place, block)[0, head].tolist()
        return tables[purpose, block][position]

    return coin, lambda level, *more: coin(schedule.LEVELS + level, *more)


@pytest.fixture
def few_levels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the fourth level the highest one, so that short streams reach it."""
    for file in (schedule, merge_reduce, pool_file):
        monkeypatch.setattr(file, "LEVELS", 4)
    monkeypatch.setattr(naive_file, "HIGHEST", 3)
    for known in (schedule.schedule, schedule.at_once):
        known.cache_clear()
    yield
    for known in (schedule.schedule, schedule.at_once):
        known.cache_clear()


def reference_of(
    pool: Balance, draws: CounterRNG, head: int, length: int, scale: float
) -> Reference:
    """Return the naive loop with a pool's parameters."""
    separate = pool.sets == "separate"
    balance = SoftmaxBalance(
        pool.halves,
        pool.gamma,
        pool.temperature,
        1.0 if separate else pool.constant,
        scale,
        pool.sets == "flat",
    )
    one, others = coins(draws, head, length)
    largest = pool.n // (2 if pool.eager else 16)
    block = pool.block or min(256, max(2, largest - largest % 2))
    above = others if separate else None
    return Reference(pool.n, block, balance, one, above, pool.precision, pool.eager)


def agree(stream: Stream, row: int, head: int, naive: Reference) -> None:
    """Check that the pool holds what the naive loop holds, with the same weights."""
    held = stream.held.map(lambda t: t[row, head])
    place = held.position[held.position >= 0].tolist()
    weights = [w[held.position >= 0].tolist() for w in (held.a, held.b)]
    mine = sorted(zip(place, *weights, strict=True))
    wanted = [(t.position, t.a, t.b) for t in naive.holds()]
    assert [p for p, _, _ in mine] == [p for p, _, _ in wanted]
    found, exact = (torch.tensor([token[1:] for token in it]) for it in (mine, wanted))
    # The logarithm of a weight is a sum with one term for each halving.
    close(found, exact, terms=16, size=max(1.0, largest(exact)))


POOLS = [
    (Balance(48, 16), 64, 700, 1.0, False),
    pytest.param(Balance(48, 16), 1, 400, 1.0, False, marks=pytest.mark.slow),
    (Balance(20), 7, 600, 0.6, True),
    (Balance(4), 3, 400, 1.0, False),
    (Balance(40, 8, "pairs", None, 1.0), 9, 800, 0.7, True),
    pytest.param(
        Balance(48, 16, "authors", 4.0, 1.0), 64, 1000, 0.8, False, marks=pytest.mark.slow
    ),
    (Balance(48, 16, "authors", 0.5, 1.0, sets="flat"), 1, 200, 1.0, True),
    pytest.param(Balance(32, 16, "paper", None, 1.0), 13, 600, 0.7, False, marks=pytest.mark.slow),
    pytest.param(
        Balance(48, 16, "paper", 4.0, eager=True), 64, 1000, 1.0, True, marks=pytest.mark.slow
    ),
    pytest.param(Balance(48, 16, eager=True), 5, 600, 0.9, False, marks=pytest.mark.slow),
    (Balance(64, eager=True), 64, 700, 1.0, False),
    (Balance(60, 16, sets="separate"), 64, 500, 1.0, False),
    (Balance(60, 16, sets="separate", precision=4.0), 1, 120, 1.0, False),
    pytest.param(
        Balance(60, 8, "paper", 4.0, sets="separate", precision=2.0),
        11,
        500,
        0.7,
        True,
        marks=pytest.mark.slow,
    ),
    pytest.param(
        Balance(40, 8, "authors", None, 1.0, sets="separate", eager=True),
        11,
        400,
        1.0,
        False,
        marks=pytest.mark.slow,
    ),
    (Balance(4, sets="separate", precision=0.0), 3, 30, 1.0, False),
    (Balance(6, halves="paper", sets="separate", precision=0.0, eager=True), 7, 40, 0.7, True),
]


@pytest.mark.parametrize(("pool", "chunk", "length", "share", "weighted"), POOLS)
def test_it_holds_what_a_naive_loop_holds(pool, chunk, length, share, weighted):
    compare(pool, chunk, length, share, weighted)


@pytest.mark.parametrize(("pool", "chunk", "length", "share", "weighted"), POOLS[2::3])
@pytest.mark.thinned(2)
def test_so_it_does_where_the_highest_level_is_halved_into_itself(
    few_levels, pool, chunk, length, share, weighted
):
    stream = compare(pool, chunk, length, share, weighted)
    assert int(stream.state["level"].max()) == 3


def compare(pool: Balance, chunk: int, length: int, share: float, weighted: bool) -> Stream:
    """Compare a stream, fold by fold, with what a naive loop holds. Return the stream."""
    flow = lumps(2, 2, length)
    flow.weights = weights if weighted else None
    stream = Stream(pool, flow, chunk, share, CounterRNG(3))
    naive = {
        (row, head): reference_of(pool, stream.draws, head, length, FOLD.form.scale)
        for row, head in itertools.product(range(2), range(2))
    }
    for row, head, loop in stream.beside(naive, Token):
        agree(stream, row, head, loop)
        loop.give_back()
    if pool.precision > 1:
        assert all(loop.erased for loop in naive.values())
    return stream


@pytest.mark.parametrize(
    "pool",
    [
        Balance(32, 8),
        Balance(32, 8, "authors", sets="flat"),
        # Without `eager`, places that short halves leave empty are freed once a fold, so that
        # results depend on the cuts.
        Balance(32, 8, "paper", eager=True),
        pytest.param(
            Balance(32, 8, "paper", sets="separate", precision=1.0, eager=True),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_does_not_matter_how_the_stream_was_cut(pool):
    check_cuts(pool, 200)


def check_cuts(pool: Balance, length: int) -> None:
    """Check that streams with chunks of different sizes hold the same in the end."""
    flow = lumps(1, 3, length)
    one, *others = (Stream(pool, flow, chunk).whole() for chunk in (1, 7, 64, length))
    for other in others:
        assert len(one.held) == len(other.held)
        for head in range(3):
            slots = [sorted(slots_of(stream, head)) for stream in (one, other)]
            assert slots[0] == slots[1]


@pytest.mark.parametrize("pool", [Balance(8), Balance(8, sets="separate", precision=1.0)])
@pytest.mark.slow
def test_nor_does_it_where_the_highest_level_is_halved_into_itself(few_levels, pool):
    check_cuts(pool, 150)


def slots_of(stream: Stream, head: int) -> list[tuple[float, ...]]:
    """Return (position, a, b, level) of all slots of a head of the first row, even empty ones."""
    held = stream.held
    level = stream.state["level"][:, :, : len(held)]
    parts = (held.position, held.a, held.b, level)
    return list(zip(*(t[0, head].tolist() for t in parts), strict=True))


@given(
    st.integers(2, 24),
    st.integers(1, 12),
    st.sampled_from(["pairs", "authors"]),
    st.lists(st.integers(0, 70), min_size=1, max_size=5),
    st.booleans(),
)
def test_it_never_holds_more_than_its_slots_and_loses_no_weight(half, block, halves, sizes, eager):
    pool = Balance(2 * half, 2 * min(block, half // 2) or None, halves, eager=eager)
    flow = lumps(1, 2, sum(sizes) + 1)
    held = flow.at(torch.empty(1, 2, 0, dtype=torch.int64))
    state, seen = pool.state(held), 0
    for size in sizes:
        new = flow.at(torch.arange(seen, seen + size).expand(1, 2, -1))
        held, _ = pool.fold(held, new, replace(FOLD, state=state))
        seen += size
        assert len(held) <= pool.slots()
        assert bool(held.held.all()), "a slot in use is empty, and no half was short"
        if seen <= pool.n and not eager:
            assert held.position[0, 0].tolist() == list(range(seen))
            assert not held.a.any() and not held.b.any()
        if halves == "pairs":
            for weights in (held.a, held.b):
                total = weights.double().exp().sum(dim=2)
                within(total, torch.full_like(total, seen), weights_off(seen) * seen)
        elif size:
            assert held.a.double().exp().sum(dim=2).max() <= seen * (1 + weights_off(seen))


@pytest.mark.slow
def test_a_stream_of_any_length_keeps_its_slots_and_its_whole_weight():
    pool = Balance(24, 8)
    flow = lumps(1, 1, 20_000)
    stream = Stream(pool, flow, 500)
    sizes = set()
    for arrivals in stream:
        if arrivals[0, 0, 0] > 2000:
            sizes.add(len(stream.held))
    assert min(sizes) > 24 - 5
    assert stream.held.a.double().exp().sum().item() == pytest.approx(
        20_000, rel=weights_off(20_000)
    )
    assert stream.held.a.max() > 8 * math.log(2)


@pytest.mark.parametrize("pool", [Balance(64, halves="paper"), Balance(64, eager=True)])
def test_slots_are_not_left_idle_by_short_halves_nor_by_small_blocks(pool):
    stream, used = Stream(pool, lumps(1, 4, 4000), 64), []
    for arrivals in stream:
        if arrivals[0, 0, 0] > 1000:
            used.append(stream.held.held.sum(dim=2).double().mean())
    # With `eager`, levels are half full on average, and low levels are small.
    assert sum(used) / len(used) > (0.35 if pool.eager else 0.7) * 64


@pytest.mark.slow
def test_so_few_slots_that_all_levels_are_used_up_keep_their_weight_too():
    """There are as many sets as slots, and each set holds a single token. With almost every token
    that arrives, one of them rises to the next level.
    """
    flow = lumps(1, 2, 300)
    lengths = 4.0 ** (torch.arange(300) % 3)
    flow.values = F.normalize(torch.ones_like(flow.values), dim=-1) * lengths[:, None]
    stream = Stream(Balance(4, sets="separate", precision=0.0), flow, 50).whole()
    held, levels = stream.held, stream.state["level"]
    assert len(held) == 4
    assert levels.amax(dim=2).tolist() == [[schedule.LEVELS - 1] * 2]
    below = held.b.double().exp().sum(dim=2)
    within(below, torch.full_like(below, 300), weights_off(300) * 300)
    for kind in range(3):
        above = (held.a.double().exp() * (held.position % 3 == kind)).sum(dim=2)
        within(above, torch.full_like(above, 100), weights_off(100) * 100)
    assert stream.pool.wrong_state(stream.state, 4, 300) is None


@pytest.mark.slow
def test_the_highest_level_is_as_fair_to_old_tokens_as_to_new_ones(few_levels):
    """Which tokens stay is drawn at each halving. On average, the weights of the older half of all
    tokens must add up to the size of this half.
    """
    flow, shares = lumps(1, 64, 400), []
    for seed in range(8):
        held = Stream(Balance(4), flow, 50, draws=CounterRNG(seed)).whole().held
        old = held.position < 200
        shares += (held.a.double().exp() * old).sum(dim=2).flatten().tolist()
    mean = sum(shares) / len(shares)
    spread = torch.tensor(shares).std().item() / len(shares) ** 0.5
    assert abs(mean - 200) < 4 * spread, (mean, spread)


PROMPTS = [
    (Balance(48, 16), 300),
    (Balance(48, 8), 96),
    (Balance(48, 8), 97),
    (Balance(48), 60),
    pytest.param(Balance(48), 600, marks=pytest.mark.slow),
    (Balance(4), 77),
    pytest.param(Balance(20, 4, "pairs", None, 1.0), 333, marks=pytest.mark.slow),
    pytest.param(Balance(48, 16, "authors", 4.0, 1.0), 200, marks=pytest.mark.slow),
    (Balance(40, 8, "authors", 0.5, 1.0, sets="flat"), 190),
    (Balance(32, 16, "paper", None, 1.0), 250),
]


@pytest.mark.parametrize(("pool", "length"), PROMPTS)
def test_a_whole_prompt_is_halved_as_a_naive_loop_halves_it(pool, length):
    flow = lumps(2, 2, length)
    place = torch.arange(length).expand(2, 2, -1)
    stream = Stream(pool, flow, length, draws=CounterRNG(3))
    none = flow.at(place[:, :, :0])
    fold = replace(FOLD, draws=stream.draws, state=pool.state(none), prompt=True)
    stream.held, rest = pool.fold(none, flow.at(place), fold)
    assert len(rest) == 0
    assert len(stream.held) <= pool.slots()
    lists = {name: t.tolist() for name, t in flow.at(place).tensors().items()}
    for row, head in itertools.product(range(2), range(2)):
        loop = reference_of(pool, stream.draws, head, length, FOLD.form.scale)
        mine = [lists[name][row][head] for name in ("keys", "values", "a", "b")]
        tokens = [Token(p, *values) for p, values in enumerate(zip(*mine, strict=True))]
        loop.take_prompt(tokens, pool.block or 256)
        agree(stream, row, head, loop)


def test_a_prompt_that_is_little_too_long_stays_exact_but_for_twice_the_excess():
    # The paper's Table 5: to keep a share 1 - alpha, a share 2 alpha is halved.
    pool, length = Balance(900, 50), 1000
    flow = lumps(1, 1, length)
    place = torch.arange(length)[None, None]
    none = flow.at(place[:, :, :0])
    for prompt in (True, False):
        state = pool.state(none)
        held, _ = pool.fold(none, flow.at(place), replace(FOLD, state=state, prompt=prompt))
        weights = held.b[0, 0].exp().round().int()
        assert len(held) == 900
        assert weights.bincount().tolist() == [0, 800, 100]
        assert held.position[0, 0, weights == 2].max() < 200


# --- what is unusual


@pytest.mark.parametrize("sets", ["shared", "separate"])
@pytest.mark.parametrize("gamma", [4.0, None])
def test_equal_keys_and_values_of_zero_are_tokens_like_others(sets, gamma):
    keys, values = torch.ones(1, 1, 50, 3), torch.zeros(1, 1, 50, 1)
    values[:, :, ::2] = 1.0
    held = Stream(Balance(16, 4, gamma=gamma, sets=sets), Flow(keys, values), 8).whole().held
    assert held.b.exp().sum().item() == pytest.approx(50, rel=weights_off(50))
    assert not held.a.isnan().any() and not held.b.isnan().any()
    heavy = (held.a.exp() * held.values[..., 0]).sum().item()
    assert (
        heavy == pytest.approx(25, rel=weights_off(50)) if sets == "separate" else 10 < heavy < 40
    )


@pytest.mark.parametrize("halves", ["pairs", "authors", "paper"])
def test_half_precision_and_large_keys_do_no_harm(halves):
    flow = lumps(1, 2, 200)
    flow = Flow((flow.keys * 40).half(), flow.values.half())
    pool = Balance(32, 8, halves, temperature=1.0)
    held = Stream(pool, flow, 9).whole().held
    assert held.keys.dtype == torch.float16
    assert held.a.isfinite().all() or halves == "paper"
    assert not held.a.isnan().any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_what_is_no_number_is_refused_and_changes_nothing(bad, part):
    pool = Balance(16, 4)
    stream = Stream(pool, lumps(1, 1, 40), 8).whole()
    state = dict(stream.state)
    new = stream.flow.at(torch.arange(8)[None, None])
    getattr(new, part)[0, 0, 3, 1] = bad
    with pytest.raises(WeirError, match="not finite"):
        pool.fold(stream.held, new, replace(FOLD, state=state))
    assert all(state[name] is t for name, t in stream.state.items())


# --- through a model

SMALL = "sink(2) | recent(6) | balance(16, block=4)"
FLAT = "sink(2) | recent(6) | balance(16, 8, halves=authors, sets=flat)"
APART = "sink(2) | recent(6) | balance(24, block=4, sets=separate)"


def naive_pipe(pool: Balance, length: int, scale: float) -> Callable[..., Any]:
    """Return the naive form of a pipe of two sinks, six recent tokens and the pool."""
    loops: dict[tuple[int, int], Reference] = {}

    def fold(held: Any, new: Any, at: Any) -> Any:
        place = (at.layer, at.head)
        if place not in loops:
            draws = CounterRNG(0, layer=at.layer, pool=2)
            loops[place] = reference_of(pool, draws, at.head, length, scale)
        sinks, recent, middle = held
        line = [*recent, *new]
        while line and len(sinks) < 2:
            sinks = [*sinks, line.pop(0)]
        leaving, line = line[: max(0, len(line) - 6)], line[-6:]
        for t in leaving:
            key = tuple(at.rotate(t.key[None], t.position)[0].tolist())
            loops[place].take(Token(t.position, key, tuple(t.value.tolist())))
        known = {t.position: t for t in [*middle, *leaving]}
        kept = []
        for it in loops[place].holds():
            known_as = known[it.position]
            kept.append(replace(known_as, a=it.a, b=it.b))
        return [sinks, line, kept]

    return fold


@pytest.mark.parametrize(
    ("text", "positions", "chunk"),
    [(SMALL, "rolling", 5), (SMALL, "original", 1), (FLAT, "rolling", 3), (APART, "original", 5)],
)
def test_a_model_reads_on_as_the_naive_loop_does(llama, ids, naive, text, positions, chunk):
    tokens = ids(1, 100)
    cache = weir.StreamingCache(llama, text, chunk=chunk, positions=positions)
    fold = naive_pipe(weir.policy(text).pools[2], 100, 16**-0.5)
    loop = naive(llama, fold, pools=3, chunk=chunk, rolling=positions == "rolling")
    got = fed(llama, cache, tokens, [50, 1, 1, 48])[0]
    close_runs(got, loop.feed(tokens[0]), llama)
    holds_as(cache, loop)


@pytest.mark.parametrize("text", [SMALL, FLAT])
def test_a_prompt_that_a_model_reads_whole_is_halved_in_rounds(shallow, ids, text):
    cache = weir.StreamingCache(shallow, text, chunk=5, prefill="full")
    fed(shallow, cache, ids(1, 150), [150])
    held = cache.slots(0)
    mine = (held.pool == held.pools.index("balance")) & (held.position >= 0)
    for head in range(2):
        weights = held.b[0, head][mine[0, head]].exp().round().int().bincount()
        # Three halvings of 142 tokens leave 17 of weight 8, one of 4 and one of 2. These 19 are 3
        # too many, so 6 tokens are halved once more.
        found = {weight: count for weight, count in enumerate(weights.tolist()) if count}
        assert found == {2: 1, 4: 1, 8: 11, 16: 3}


def test_after_a_pool_that_lets_heads_differ_it_takes_what_each_lets_go(llama, ids):
    text = "sink(2) | recent(6) | heavy(6) | balance(12, block=4)"
    tokens = ids(1, 90)
    stream = weir.Stream(llama, text, chunk=4)
    stream.feed(tokens)
    held = stream.slots(layer=0)
    mine = held.pool == held.pools.index("balance")
    # Every token is still represented: by its own slot, or in the weights of what balance keeps.
    exact = (held.position >= 0) & ~mine
    total = held.a.exp().where(mine, 0.0).sum(dim=2) + exact.sum(dim=2)
    within(total, torch.full_like(total, 90.0), weights_off(90) * 90)
