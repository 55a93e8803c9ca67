"""The pool `hive` (BUZZ): an eviction keeps local maxima of new tokens, and thins out old ones."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from roundings import close_runs
from streams import (
    PADDING,
    PROMPT,
    Streams,
    compare,
    fed,
    naive_pools,
    places,
    read,
    tokens,
    unharmed,
)
from torch import Tensor

import weir
from weir.errors import PolicyError
from weir.policies.grammar import policy
from weir.policies.library import buzz
from weir.pools import Fold, Hive, Recent, Sink
from weir.pools.counter_rng import CounterRNG
from weir.slab.attention import AttentionParams

pytestmark = pytest.mark.thinned(3, least=2)

# --- against the naive loop


@pytest.mark.parametrize(("chunk", "length", "stride"), [(1, 200, 4), (7, 600, 5), (64, 800, 4)])
def test_its_slots_are_those_of_the_naive_loop_over_thousands_of_tokens(
    twins, chunk, length, stride
):
    rows = compare(twins, f"sink(2) | recent(9) | hive(31, {stride})", chunk, length)
    one, other = places(rows[1].held[2])
    assert one != other != places(rows[2].held[2])[1]


@pytest.mark.parametrize("options", ["swapped=true", "local_max=false", "true, false"])
@pytest.mark.parametrize("stride", [3, 6])
def test_the_ablations_hold_the_slots_of_their_naive_loops(twins, stride, options):
    compare(twins, f"recent(4) | hive(17, {stride}, {options})", 5, 400)


@pytest.mark.parametrize(
    "text",
    [
        "hive(12, 3)",
        "sink(2) | recent(5) | heavy(7) | hive(12, 3)",
        "recent(5) | hive(12, 3) | heavy(7)",
        "recent(5) | hive(12, 3) | hive(9, 4)",
        "recent(5) | heavy(3) | hive(9, 5) | recent(6)",
    ],
)
def test_wherever_it_stands_its_slots_are_those_of_the_naive_loop(twins, text):
    compare(twins, text, 3, 120, starts=(0, 7))
    compare(twins, text, 40, 200, starts=(0, 7))


@pytest.mark.parametrize("prompt", [20, 27, 28, 33, 120, 900])
def test_of_a_whole_prompt_samples_are_taken_until_they_fit(twins, prompt):
    rows = compare(twins, "sink(2) | recent(5) | hive(20, 5)", 4, prompt + 200, prompt=prompt)
    assert all(len(row.held[2]) <= 20 for row in rows)


@pytest.mark.parametrize(
    ("text", "chunk", "prefill"),
    [
        pytest.param("sink(2) | recent(5) | hive(11, 3)", 1, "chunked", marks=pytest.mark.slow),
        ("sink(2) | recent(5) | hive(11, 3)", 4, "full"),
        ("recent(4) | hive(9, 4)", 4, "chunked"),
        pytest.param("recent(4) | hive(9, 4)", 1, "full", marks=pytest.mark.slow),
    ],
)
def test_a_model_with_it_gives_what_the_naive_loop_gives(
    llama, naive, twins, ids, text, chunk, prefill
):
    got, cache, rows = read(llama, ids, text, chunk, prefill)
    for row, pads in enumerate(PADDING):
        prompt = PROMPT - pads
        pools = naive_pools(text, twins, prompt if prefill == "full" else 0)
        loop = naive(llama, twins.pipe(*pools), len(pools), chunk)
        wanted = [loop.feed(rows[row][:prompt], at_once=prefill == "full")]
        wanted.append(loop.feed(rows[row][prompt:]))
        close_runs(got[row, pads:], torch.cat(wanted), llama)
        for layer in range(2):
            held = cache.slots(layer).position[row]
            for head in range(2):
                mine = sorted(place for place in held[head].tolist() if place >= 0)
                assert mine == sorted(t.position for t in loop.slots(layer, head))


# --- when it evicts, and how many are left


def ceiled(n: int, by: int) -> int:
    """n / by, rounded up: how many of n tokens are left if one of every `by` tokens is kept."""
    return -(-n // by)


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 10])
@pytest.mark.parametrize("stride", [3, 4, 7, 8])
def test_its_size_follows_the_recurrence_and_settles_where_the_theorem_says(stride, chunk):
    threshold = 97
    after: list[int] = []
    settled = -1

    def watch(index, row):
        nonlocal settled
        last = int(row.states[0]["settled"].max())
        if last != settled:
            settled = last
            after.append(int((row.held[0].position[0, 0] <= last).sum()))

    Streams(policy(f"hive({threshold}, {stride})"), chunk, heads=1, watch=watch).run(1500)
    small = (stride + 1) // 2
    expected = [ceiled(threshold + 1, stride)]
    while len(expected) < len(after):
        old = expected[-1]
        expected.append(ceiled(old, small) + ceiled(threshold + 1 - old, stride))
    assert len(after) > 15
    assert after == expected
    # `after` has the number of tokens, a, after each eviction. Without rounding, it settles where
    # a = a / small + (T - a) / stride, and this a is the theorem's w. Each eviction adds less than
    # 1 twice by rounding up, and 1 / stride for the token in excess of T. Of what earlier evictions
    # added, the share 1 / small - 1 / stride is left, so the sum is divided by `share`.
    share = 1 - Fraction(1, small) + Fraction(1, stride)
    exact = Fraction(threshold, stride) / share
    if stride % 2:
        assert exact == Fraction(threshold * (stride + 1), stride**2 + 1)
    else:
        assert exact == Fraction(threshold, stride - 1)
    assert all(0 <= size - exact < (2 + Fraction(1, stride)) / share for size in after[8:])


@given(
    st.integers(3, 8),
    st.integers(0, 25),
    st.lists(st.integers(0, 40), max_size=9),
    st.booleans(),
    st.booleans(),
)
@pytest.mark.slow
def test_how_arrivals_are_cut_makes_no_difference(stride, more, sizes, swapped, local_max):
    hive = Hive(stride + more, stride, swapped, local_max)
    held, gone = fed(hive, sizes)
    alone, gone_alone = fed(hive, [1] * sum(sizes))
    assert places(held) == places(alone)
    assert len(held) <= hive.slots()
    assert unharmed(held)
    for head in range(2):
        left = sorted(place for rest in gone for place in places(rest)[head])
        assert left == sorted(place for rest in gone_alone for place in places(rest)[head])
        assert sorted(left + places(held)[head]) == list(range(sum(sizes)))


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_it_fills_its_slots_and_never_exceeds_them(chunk):
    sizes = []

    def watch(index, row):
        sizes.append(len(row.held[0]))

    Streams(policy("hive(23, 5)"), chunk, watch=watch).run(600)
    assert max(sizes) == 23 == Hive(23, 5).slots()


# --- which tokens it keeps


def one_eviction(mass: list[list[float]], **options: bool) -> list[list[int]]:
    """The tokens of each head that stay when just enough tokens arrive for one eviction."""
    width = len(mass[0])
    pool = Hive(width - 1, 4, **options)
    new = tokens(torch.arange(width).expand(1, len(mass), -1))
    held = new.part(0, 0)
    new.mass = torch.tensor([mass])
    fold = Fold(CounterRNG(0), torch.tensor([width]), AttentionParams(1.0), state=pool.state(held))
    return places(pool.fold(held, new, fold)[0])


@given(st.lists(st.lists(st.integers(0, 5), min_size=11, max_size=11), min_size=1, max_size=3))
def test_of_each_segment_the_most_attended_token_stays_and_the_first_of_equals(mass):
    for kept, received in zip(one_eviction([[*map(float, m)] for m in mass]), mass, strict=True):
        assert len(kept) == 3
        for place, segment in zip(kept, (range(4), range(4, 8), range(8, 11)), strict=True):
            assert place == max(segment, key=lambda p: (received[p], -p))


def test_without_local_maxima_the_first_of_each_segment_stays():
    assert one_eviction([[0.0, 9.0] * 5], local_max=False) == [[0, 4, 8]]


def test_swapped_strides_halve_the_segments():
    assert one_eviction([[0.0, 9.0] * 5], swapped=True) == [[1, 3, 5, 7, 9]]


def test_old_tokens_are_thinned_from_the_oldest_on_whatever_they_received():
    heavy_ends = [[9.0] + [float(place % 4 == 3) for place in range(1, 13)]]
    assert one_eviction(heavy_ends) == [[0, 7, 11, 12]]
    # Tokens 0, 7, 11 and 12 are old, 13 to 21 are new. Every second old token stays, and the
    # maximum of each segment of new tokens.
    pool, start = Hive(12, 4), tokens(torch.arange(13).expand(1, 1, -1))
    start.mass = torch.tensor([heavy_ends])
    state = pool.state(start)
    fold = Fold(CounterRNG(0), torch.tensor([13]), AttentionParams(1.0), state=state)
    held, _ = pool.fold(start.part(0, 0), start, fold)
    held.mass = torch.tensor([[[0.0, 99.0, 0.0, 99.0]]])
    more = tokens(torch.arange(13, 22).expand(1, 1, -1))
    more.mass = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0, 0.0]]])
    held, gone = pool.fold(held, more, fold)
    assert places(held) == [[0, 11, 16, 17, 21]]
    assert places(gone) == [[7, 12, 13, 14, 15, 18, 19, 20]]
    assert int(state["settled"]) == 21


# --- the named policy


@pytest.mark.parametrize("stride", range(3, 12))
@pytest.mark.parametrize("budget", [60, 350, 1000])
def test_buzz_shares_its_budget_as_the_theorem_says(budget, stride):
    made = buzz(budget, stride)
    sink, recent, hive = made.pools
    assert (sink, hive.stride, made.slots) == (Sink(4), stride, budget)
    ratio = Fraction(stride**2 + 1, stride + 1) if stride % 2 else stride - 1
    # With one token more or less in the window, the ratio would be no closer.
    assert abs(hive.threshold - ratio * recent.n) <= (1 + ratio) / 2


def test_buzz_has_the_paper_s_ratio_and_takes_the_authors_parameters():
    assert buzz().pools == (Sink(4), Recent(65), Hive(281, 5))
    assert abs(281 / 65 - 4.33) < 0.02
    text = "buzz(budget=564, window=160, stride=5)"
    assert policy(text).pools == (Sink(4), Recent(160), Hive(400, 5))
    everything = buzz(30, 3, 0, 10, True, False, True)
    assert everything.pools == (Recent(10), Hive(20, 3, True, False, True))


# --- in a model


@pytest.mark.parametrize(
    ("chunk", "prefill"), [(4, "chunked"), pytest.param(1, "full", marks=pytest.mark.slow)]
)
def test_with_log_n_logits_are_scaled_by_the_number_of_tokens_seen(
    llama, naive, twins, ids, chunk, prefill
):
    class Sharpened(naive):
        def _attend(self, layer: int, head: int, q: Tensor, scale: float) -> Tensor:
            n = len(self.slots(layer, head))
            return super()._attend(layer, head, q, scale * math.log(n, 512))

    text = "sink(2) | recent(5) | hive(11, 3, log_n=true)"
    got, _, rows = read(llama, ids, text, chunk, prefill)
    for row, pads in enumerate(PADDING):
        prompt = PROMPT - pads
        pools = naive_pools(text, twins, prompt if prefill == "full" else 0)
        loop = Sharpened(llama, twins.pipe(*pools), len(pools), chunk)
        wanted = [loop.feed(rows[row][:prompt], at_once=prefill == "full")]
        wanted.append(loop.feed(rows[row][prompt:]))
        close_runs(got[row, pads:], torch.cat(wanted), llama)


def test_rows_that_change_places_take_their_hives_along(llama, ids):
    text, order = ids(3, 100), torch.tensor([2, 0, 0])
    mask = torch.ones_like(text)
    for row, pads in enumerate(PADDING):
        mask[row, :pads] = 0
    one, other = (weir.StreamingCache(llama, "buzz(budget=20, stride=3)", chunk=5) for _ in "ab")
    with torch.no_grad():
        llama(text[:, :57], attention_mask=mask[:, :57], past_key_values=one)
        llama(text[order, :57], attention_mask=mask[order, :57], past_key_values=other)
        one.batch_select_indices(order)
        got = llama(text[order, 57:], attention_mask=mask[order], past_key_values=one).logits
        wanted = llama(text[order, 57:], attention_mask=mask[order], past_key_values=other).logits
    close_runs(got, wanted, llama)


# --- bad input


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("recent(9) | »hive(20, 2)", "stride must be at least 3, got 2"),
        ("recent(9) | »hive(20, -1)", "stride must be at least 3, got -1"),
        ("recent(9) | »hive(4)", "threshold must be at least the stride, 5, got 4"),
        ("recent(9) | »hive(6, stride=7)", "at least the stride, 7"),
        (
            "»buzz(budget=9)",
            ("is too small for 4 sinks, a window of 1 and a hive with one stride of 5"),
        ),
        ("»buzz(budget=9)", "at least 10"),
        ("»buzz(stride=0)", "at least 3, got 0"),
        ("»buzz(stride=-1)", "at least 3, got -1"),
        ("»buzz(sinks=-1)", "at least 1 token, got -1"),
        ("»buzz(window=0)", "n of recent must be a whole number of at least 1 or none, got 0"),
        ("»buzz(window=350)", "at least 359"),
    ],
)
def test_what_makes_no_hive_is_pointed_at(text, reason):
    at = text.index("»")
    with pytest.raises(PolicyError, match=reason) as error:
        policy(text.replace("»", ""))
    assert error.value.at == at


@pytest.mark.parametrize("stride", [3, 4, 5])
def test_the_smallest_budget_works(stride, twins):
    compare(twins, str(buzz(4 + 1 + stride, stride)), 2, 200, starts=(0, 3))
