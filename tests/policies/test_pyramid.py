"""Pyramids: more slots in the lower layers and fewer in the upper ones, with the same total."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_runs import reads_as, restored_goes_on, rows_read_alone
from reference.pyramid import exact_budgets
from reference.snap import snap_of
from roundings import close_runs, off
from transformers import Gemma2Config, Gemma2ForCausalLM

import weir
from weir.errors import PolicyError, WeirError
from weir.policies.grammar import policy
from weir.policies.pipe import Pipe
from weir.policies.wrappers import Pyramid, budgets, pyramid, pyramidkv
from weir.pools import Heavy, Recent, Sink, Snap

pytestmark = pytest.mark.thinned(3, least=2)

SMALL = "pyramidkv(budget=24, window=6, kernel=5, beta=4)"
PIPES = [
    SMALL,
    "pyramid(sink(2) | recent(8) | heavy(14), beta=3)",
    "pyramid(streaming_llm(budget=24), beta=2)",
    "pyramid(recent(8) | heavy(8) | reservoir(8), beta=2.5)",
]


@given(st.integers(1, 5000), st.integers(2, 90), st.floats(1.0, 60.0))
def test_budgets_are_the_papers_sequence_in_whole_numbers(mean, layers, beta):
    found = budgets(mean, layers, beta)
    assert sum(found) == layers * mean
    assert all(lower >= upper >= 0 for lower, upper in pairwise(found))
    for slots, wanted in zip(found, exact_budgets(mean * layers, layers, beta), strict=True):
        assert abs(slots - wanted) <= 1 + wanted * off(layers, torch.float64)


def test_the_pyramid_of_32_layers_and_the_one_of_one():
    # 256 slots, 8 of them the window: from 2 * 248 - 248/20 down to 248/20.
    found = budgets(248, 32, 20.0)
    assert (found[0], found[-1]) == (484, 12)
    assert budgets(248, 1, 20.0) == [248]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.integers(0, 9),
    st.integers(1, 40),
    st.integers(1, 12),
    st.floats(1.0, 8.0),
)
def test_any_pipe_keeps_its_total_its_front_and_its_shares(sizes, sinks, recent, layers, beta):
    front = (*([Sink(sinks)] if sinks else []), Recent(recent))
    pipe = Pipe((*front, *(Heavy(size) for size in sizes)))
    try:
        made = Pyramid(pipe, beta)
    except WeirError:
        # It is refused only if the top layer would not have a slot for each pool.
        assert sum(sizes) / beta < len(sizes)
        return
    pipes = [made.for_layer(layer, layers) for layer in range(layers)]
    assert sum(each.slots for each in pipes) == layers * pipe.slots
    for each in pipes:
        assert each.pools[: len(front)] == front
        heavy = [pool.n for pool in each.pools[len(front) :]]
        for size, mean in zip(heavy, sizes, strict=True):
            assert size >= 1
            assert abs(size - sum(heavy) * mean / sum(sizes)) < len(sizes) + 1
    if beta == 1.0:
        assert all(each == pipe for each in pipes)


def test_a_beta_of_one_is_no_pyramid():
    pipe = policy("sink(4) | recent(60) | heavy(100) | reservoir(92)")
    assert all(pyramid(pipe, 1.0).for_layer(layer, 7) == pipe for layer in range(7))


def test_what_every_layer_has_are_first_and_newest_tokens():
    def pools(text, layer):
        return policy(text).for_layer(layer, 2).pools

    assert pools("pyramid(sink(4) | recent(20) | heavy(40), beta=4)", 1) == (
        Sink(4),
        Recent(20),
        Heavy(10),
    )
    # If there are only first and newest tokens, the newest form the pyramid.
    assert pools("pyramid(sink(4) | recent(40), beta=4)", 0) == (Sink(4), Recent(70))
    # SnapKV's window has its full size in every layer, whether `snap` or `recent` holds it.
    assert pools("pyramid(snap(48, window=8), beta=4)", 1) == (Snap(18, window=8),)
    assert pools("pyramid(recent(8) | snap(40, window=8), beta=4)", 1) == (
        Recent(8),
        Snap(10, window=8),
    )


def test_a_small_pool_keeps_a_slot_where_its_share_is_less():
    made = policy("pyramid(recent(9) | heavy(2) | reservoir(60), beta=10)")
    assert [pool.slots() for pool in made.for_layer(1, 2).pools] == [9, 1, 5]


def test_a_pool_of_several_sizes_keeps_their_proportion():
    made = policy("pyramid(recent(20) | subgen(samples=16, clusters=8, per_cluster=4), beta=3)")
    layers = [made.for_layer(layer, 3).pools[1] for layer in range(3)]
    assert [(p.samples, p.clusters, p.slots()) for p in layers] == [
        (28, 13, 80),
        (16, 8, 48),
        (8, 2, 16),
    ]
    assert all(p.per_cluster == 4 for p in layers)


def test_a_pyramid_is_written_around_any_pipe():
    h2o = policy("h2o(budget=64)")
    for text in (
        "pyramid(recent(32) | heavy(32), beta=10)",
        "pyramid(h2o(budget=64), beta=10)",
        "pyramid(h2o(64), 10.0)",
        "  pyramid ( pipe = recent(32)|heavy( 32 ) , beta = 10 ) ",
    ):
        assert policy(text) == pyramid(h2o, 10.0) == Pyramid(h2o, 10.0)
        assert str(policy(text)) == text.strip()
    assert policy("pyramid(snapkv)") == pyramid(policy("snapkv"))
    assert policy("pyramid( snapkv , beta=2)") == pyramid(policy("snapkv"), 2.0)
    assert policy("pyramid") == policy("pyramidkv") == pyramidkv()
    assert policy("pyramidkv(budget=100)").pipe == Pipe((Snap(100, window=8, kernel=7),))
    for made in (pyramid(h2o, 2.5), pyramidkv(64)):
        assert policy(str(made)) == made


# Where the error lies is marked with »; the marks are taken out before it is read.
MISTAKES = {
    "»pyramid(dense)": "dense has no limit",
    "»pyramid(uniform(rate=0.5))": "has no limit",
    "»pyramid(pyramid(snapkv))": "got pyramid(snapkv)",
    "»pyramid(pyramidkv)": "got pyramidkv",
    "»pyramid(recompute(9))": "got recompute(9)",
    "»pyramid(snapkv, beta=0.5)": "at least 1, got 0.5",
    "»pyramidkv(budget=9)": "the top layer of this pyramid would have 0 slots",
    "»pyramidkv(budget=8)": "budget of snap must be at least",
    "»pyramid(buzz(budget=60), beta=20)": "threshold must be at least the stride",
    "»pyramid(recent(9) | subgen(9, 1, 4), beta=5)": "got clusters=1 and 2 slots",
    "»pyramid(recent(9) | heavy(9) | reservoir(9))": "each of its pools needs at least one",
    "pyramid(»4)": "pipe of pyramid must be a policy or none",
    "pyramid(»true)": "pipe of pyramid must be a policy or none",
    "pyramid(»snpkv)": "did you mean 'snapkv'",
    "pyramid(»snpkv(9))": "did you mean 'snapkv'",
    "pyramid(recent(9) | »hevy(9))": "did you mean 'heavy'",
    "pyramid(»snapkv | recent(4))": "snapkv is a whole policy",
    "sink(4) | »pyramid(snapkv)": "pyramid is a whole policy",
    "pyramid(snapkv(budget=50)»": "expected ',' or ')'",
    "pyramid(recent(9) | »)": "expected a pool or a policy",
    "pyramid(recent(9) »heavy(9))": "expected ',' or ')'",
    "sink(»recent(3))": "n of sink must be a whole number",
    "pyramid(sink(»recent(4)))": "n of sink must be a whole number, got recent(4)",
}


@pytest.mark.parametrize("marked", MISTAKES)
def test_a_mistake_is_pointed_at(marked):
    text = marked.replace("»", "")
    with pytest.raises(PolicyError) as caught:
        policy(text)
    assert MISTAKES[marked] in str(caught.value)
    assert caught.value.at == marked.index("»")
    assert len(str(caught.value).splitlines()) == 1


def test_a_pyramid_a_thousand_brackets_deep_is_an_error_like_any_other():
    with pytest.raises(PolicyError, match="nested at most 8 deep"):
        policy("pyramid(" * 3000)


# --- through a model


@pytest.fixture
def tall(fresh_llama):
    """A small Llama of four layers."""
    return fresh_llama(layers=4)


@pytest.mark.parametrize("text", PIPES)
@pytest.mark.thinned(4)
def test_the_cache_has_the_slots_of_a_cache_without_a_pyramid(tall, ids, text):
    mean = policy(text).pipe
    stream, flat = weir.Stream(tall, text, chunk=5), weir.Stream(tall, mean, chunk=5)
    for it in (stream, flat):
        it.feed(ids(1, 200))
    slots = [layer["slots"] for layer in stream.report()["layers"]]
    held = [sum(n for name, n in of_it.items() if name != "new") for of_it in slots]
    assert held == [stream.policy.for_layer(layer, 4).slots for layer in range(4)]
    assert held == sorted(held, reverse=True)
    assert held[0] > held[-1]
    assert sum(held) == 4 * mean.slots == 96
    assert stream.report()["bytes"] == flat.report()["bytes"]


@pytest.mark.parametrize("text", PIPES)
def test_below_the_smallest_budget_it_is_dense(tall, ids, text):
    least = policy(text).for_layer(3, 4).slots
    tokens = ids(2, least)
    with torch.no_grad():
        exact = tall(tokens).logits
    stream = weir.Stream(tall, text, chunk=3)
    close_runs(stream.feed(tokens, all_logits=True), exact, tall)


@pytest.mark.parametrize("whole", [pytest.param(0, marks=pytest.mark.slow), 60])
def test_a_model_reads_as_with_naive_pools(tall, ids, naive, twins, whole):
    layers = exact_budgets((24 - 6) * 4, 4, 4.0)
    # 18 on average: 31.5, 22.5, 13.5, 4.5 and two slots left over for the lowest layers.
    assert layers == [31.5, 22.5, 13.5, 4.5]

    def logits_of(at, place, token, queries):
        key = at.rotate(token.key[None], [token.position])[0]
        return (queries @ key * tall.model.layers[at.layer].self_attn.scaling).tolist()

    folds = [
        twins.pipe(snap_of(6 + n, 6, 5, logits_of=logits_of, others_of=lambda at: []))
        for n in (32, 23, 13, 4)
    ]
    twin = naive(tall, lambda held, new, at: folds[at.layer](held, new, at), 1, 5)
    stream = weir.Stream(tall, SMALL, chunk=5, prefill="full" if whole else "chunked")
    reads_as(stream, twin, ids(1, 130), whole)


@pytest.mark.parametrize("prefill", ["chunked", "full"])
@pytest.mark.parametrize("text", PIPES)
def test_a_padded_row_reads_as_it_would_alone(tall, ids, text, prefill):
    rows_read_alone(tall, text, ids(3, 90), [0, 13, 40], chunk=7, prefill=prefill)


@pytest.mark.parametrize("text", PIPES)
def test_a_restored_stream_goes_on_bit_for_bit_in_the_same_bytes(tall, ids, text, tmp_path):
    assert len(restored_goes_on(tall, text, ids(1, 160), 73, tmp_path, chunk=7)) == 1


def test_layers_with_a_window_of_their_own_have_no_part_in_it(ids):
    config = Gemma2Config(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=16,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).eval()
    stream = weir.Stream(model, SMALL, chunk=4)
    stream.feed(ids(1, 120))
    slots = [layer["slots"] for layer in stream.report()["layers"]]
    both = [policy(SMALL).for_layer(place, 2).slots for place in range(2)]
    assert [s.get("snap") for s in slots] == [None, both[0], None, both[1]]
    assert sum(both) == 2 * 24
