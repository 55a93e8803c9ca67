"""`StreamingCache` in direct calls of a model, however they are cut, batched or interrupted."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_runs import fed
from roundings import close_runs, largest, within
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import weir
from weir.errors import WeirError
from weir.pools import Recent

pytestmark = pytest.mark.thinned(3, least=2)


def same_slots(
    one: weir.StreamingCache, other: weir.StreamingCache, model: PreTrainedModel
) -> None:
    """Check that both hold the same tokens in the same slots, with the same keys and values."""
    for layer in range(len(one.stack)):
        mine, theirs = one.slots(layer), other.slots(layer)
        assert torch.equal(mine.position, theirs.position)
        assert torch.equal(mine.pool, theirs.pool)
        held = mine.position >= 0
        close_runs(mine.keys[held], theirs.keys[held], model)
        close_runs(mine.values[held], theirs.values[held], model)


# --- what a cache computes


@pytest.mark.parametrize("chunk", [1, 5])
def test_it_is_streaming_llm(llama, naive, twins, ids, chunk):
    tokens = ids(2, 150)
    cache = weir.StreamingCache(llama, "sink(4) | recent(12)", chunk=chunk)
    got = fed(llama, cache, tokens)
    for row in range(2):
        loop = naive(llama, twins.pipe(twins.sink(4), twins.recent(12)), 2, chunk)
        close_runs(got[row], loop.feed(tokens[row]), llama)


@pytest.mark.parametrize("positions", ["rolling", "original"])
@pytest.mark.parametrize("text", ["sink(4) | recent(60)", "window(64)", "dense", "sink(3) | dense"])
def test_below_its_budget_it_is_dense_attention(llama, ids, text, positions):
    if text.startswith("sink(3)"):
        text = "sink(3) | recent(none)"
    tokens = ids(2, 64)
    with torch.no_grad():
        wanted = llama(tokens, past_key_values=DynamicCache()).logits
    cache = weir.StreamingCache(llama, text, chunk=7, positions=positions)
    close_runs(fed(llama, cache, tokens, [40, *[1] * 24]), wanted, llama)


def test_dense_stays_dense_while_it_grows(shallow, ids):
    tokens = ids(3, 400)
    mask = torch.ones_like(tokens)
    mask[1, :13], mask[2, :90] = 0, 0
    with torch.no_grad():
        wanted = shallow(tokens, attention_mask=mask, past_key_values=DynamicCache()).logits
    cache = weir.StreamingCache(shallow, "dense", chunk=4)
    got = fed(shallow, cache, tokens, [100, *[3] * 100], mask)
    for row, pads in enumerate([0, 13, 90]):
        close_runs(got[row, pads:], wanted[row, pads:], shallow, length=400)


def test_below_its_budget_it_is_dense_attention_in_bfloat16(fresh_llama, ids):
    # Both runs round about 12 times per layer along the residual stream and twice after the last
    # layer, each time by at most 2^-8. So with two layers, the two runs differ by at most
    # 2 * 26 * 2^-8 of the largest logit.
    model, tokens = fresh_llama().bfloat16(), ids(2, 64)
    with torch.no_grad():
        wanted = model(tokens, past_key_values=DynamicCache()).logits
    got = fed(model, weir.StreamingCache(model, "sink(4) | recent(60)", chunk=7), tokens)
    within(got, wanted, 52 * 2**-8 * largest(wanted))


def test_a_full_prefill_attends_exactly_and_folds_once(llama, naive, twins, ids):
    tokens = ids(1, 60)
    cache = weir.StreamingCache(llama, "sink(4) | recent(12)", chunk=5, prefill="full")
    got = fed(llama, cache, tokens, [40, 7, *[1] * 13])
    with torch.no_grad():
        close_runs(got[:, :40], llama(tokens[:, :40]).logits, llama)
    loop = naive(llama, twins.pipe(twins.sink(4), twins.recent(12)), 2, 5)
    close_runs(got[0, :40], loop.feed(tokens[0, :40], at_once=True), llama)
    close_runs(got[0, 40:], loop.feed(tokens[0, 40:]), llama)


def test_a_full_prefill_longer_than_a_block_of_queries_is_exact_too(shallow, ids):
    tokens = ids(1, 600)
    cache = weir.StreamingCache(shallow, "sink(4) | recent(12)", chunk=5, prefill="full")
    with torch.no_grad():
        close_runs(fed(shallow, cache, tokens), shallow(tokens).logits, shallow, length=600)
    assert cache.slots().position[0, 0].tolist() == [0, 1, 2, 3, *range(588, 600)]


# --- cut into any calls


@pytest.mark.slow
def test_five_thousand_tokens_may_be_cut_in_any_way(shallow, ids):
    tokens = ids(1, 5000)
    generator = torch.Generator().manual_seed(0)
    at_random: list[int] = []
    while (left := 5000 - sum(at_random)) > 0:
        at_random.append(min(left, int(torch.randint(1, 200, (1,), generator=generator))))
    # The first thousand are fed one by one, which is many folds. To feed all of them so would show
    # nothing more.
    singly = [*[1] * 1000, 7, *[500] * 7, 493]
    ways = {}
    for name, sizes in {"once": [5000], "singly": singly, "at random": at_random}.items():
        cache = weir.StreamingCache(shallow, "sink(4) | recent(60)", chunk=16)
        ways[name] = cache, fed(shallow, cache, tokens, sizes)
    for name in ("singly", "at random"):
        close_runs(ways[name][1], ways["once"][1], shallow)
        same_slots(ways[name][0], ways["once"][0], shallow)


def test_slab_bytes_never_change_after_the_first_token(llama, ids):
    cache = weir.StreamingCache(llama, "sink(4) | recent(12)", chunk=8)
    assert cache.nbytes == 0
    tokens, sizes = ids(2, 200), [1, 1, 90, 8, 7, *[1] * 93]
    start, bytes_seen = 0, set()
    with torch.no_grad():
        for size in sizes:
            llama(tokens[:, start : start + size], past_key_values=cache)
            bytes_seen.add((cache.nbytes, *(len(layer.state.slab) for layer in cache.stack)))
            start += size
    assert len(bytes_seen) == 1
    # In 2 layers, 2 rows and 2 heads: 24 slots, each with a key and a value of 16 numbers, two
    # log-weights and a position, and 4 master copies of keys.
    assert cache.nbytes == 2 * 2 * 2 * (24 * (2 * 16 * 4 + 4 + 4 + 8) + 4 * 16 * 4)


def test_a_stream_that_starts_at_four_million_is_the_one_that_starts_at_zero(llama, ids):
    tokens = ids(2, 120)
    near, far = (
        weir.StreamingCache(llama, "sink(4) | recent(12)", chunk=5, origin=origin)
        for origin in (0, 4_000_000)
    )
    close_runs(fed(llama, far, tokens), fed(llama, near, tokens), llama)
    places = far.slots().position
    assert torch.equal(places.clamp_min(0) - 4_000_000, near.slots().position)
    assert far.seen == near.seen == [120, 120]


# --- any batch


@settings(max_examples=12)
@given(data=st.data(), chunk=st.integers(1, 9))
def test_a_row_gives_what_it_would_give_alone(llama, ids, data, chunk):
    rows = data.draw(st.integers(2, 4))
    turns = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    prefill = data.draw(st.sampled_from(["chunked", "full"]))
    tokens, mask = ids(rows, sum(turns)), torch.ones(rows, sum(turns), dtype=torch.int64)
    for start, size in zip([0, *torch.tensor(turns).cumsum(0).tolist()], turns, strict=False):
        for row in range(rows):
            mask[row, start : start + data.draw(st.integers(0, size - 1))] = 0
    options = {"chunk": chunk, "prefill": prefill}
    together = weir.StreamingCache(llama, "sink(3) | recent(8)", **options)
    got = fed(llama, together, tokens, turns, mask)
    for row in range(rows):
        real = mask[row].bool()
        alone = weir.StreamingCache(llama, "sink(3) | recent(8)", **options)
        sizes = [int(part.sum()) for part in mask[row].split(turns)]
        close_runs(got[row, real], fed(llama, alone, tokens[row : row + 1, real], sizes)[0], llama)
        assert together.seen[row] == alone.seen[0]
        held = together.slots(1).position[row]
        wanted = alone.slots(1).position.flatten().tolist()
        assert sorted(held[held >= 0].tolist()) == sorted(wanted)


def test_a_row_gives_what_it_would_give_alone_in_bfloat16(fresh_llama, ids):
    # The bound of `test_below_its_budget_it_is_dense_attention_in_bfloat16`.
    model, tokens = fresh_llama().bfloat16(), ids(2, 60)
    mask = torch.ones_like(tokens)
    mask[1, :11] = 0
    sizes = [30, *[1] * 30]
    together = weir.StreamingCache(model, "sink(3) | recent(8)", chunk=4)
    got = fed(model, together, tokens, sizes, mask)
    alone = weir.StreamingCache(model, "sink(3) | recent(8)", chunk=4)
    wanted = fed(model, alone, tokens[1:, 11:], [19, *[1] * 30])
    within(got[1, 11:], wanted[0], 52 * 2**-8 * largest(wanted))


@pytest.mark.parametrize("prefill", ["chunked", "full"])
def test_a_row_of_padding_alone_holds_nothing_and_harms_nobody(llama, ids, prefill):
    tokens = ids(2, 40)
    mask = torch.ones_like(tokens)
    mask[1] = 0
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4, prefill=prefill)
    got = fed(llama, cache, tokens, [20, 20], mask)
    assert got.isfinite().all()
    assert cache.seen == [40, 0]
    assert cache.slots().position[1].eq(-1).all()
    alone = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4, prefill=prefill)
    close_runs(got[:1], fed(llama, alone, tokens[:1], [20, 20]), llama)


def test_a_row_may_begin_after_the_others(llama, ids):
    tokens = ids(2, 50)
    mask = torch.ones_like(tokens)
    mask[1, :20] = 0
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    got = fed(llama, cache, tokens, [20, 5, *[1] * 25], mask)
    alone = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    close_runs(got[1, 20:], fed(llama, alone, tokens[1:, 20:])[0], llama)


def test_nothing_but_padding_is_a_forward_like_any_other(llama, ids):
    tokens = ids(1, 20)
    mask = torch.ones_like(tokens)
    mask[:, :8] = 0
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    got = fed(llama, cache, tokens, [8, 12], mask)
    assert got.isfinite().all()
    alone = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    close_runs(got[:, 8:], fed(llama, alone, tokens[:, 8:]), llama)


def test_rows_can_be_reordered_repeated_and_dropped(llama, ids):
    tokens = ids(3, 40)
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    fed(llama, cache, tokens[:, :30], mask=mask[:, :30])
    cache.reorder_cache(torch.tensor([2, 0, 0, 1], dtype=torch.int32))
    assert cache.batch == cache.batch_size == 4
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    order = [2, 2, 0, 0]
    with torch.no_grad():
        got = llama(tokens[order, 30:], attention_mask=mask[order], past_key_values=cache).logits
    for row, was in ((0, 2), (3, 0)):
        alone = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
        wanted = fed(llama, alone, tokens[was : was + 1, mask[was].bool()])
        close_runs(got[row], wanted[0, -10:], llama)


# --- bad input: one clear line, and nothing is lost


@pytest.fixture
def half_way(llama, ids) -> weir.StreamingCache:
    """A cache of two rows after 20 tokens."""
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    fed(llama, cache, ids(2, 30)[:, :20])
    return cache


BAD_CALLS = {
    "no tokens": (
        {"input_ids": torch.zeros(2, 0, dtype=torch.int64)},
        "nothing new was fed after 20 tokens",
    ),
    "ids too high": ({"input_ids": torch.tensor([[62], [61]])}, "id 62 is out of range.*0 to 60"),
    "ids below zero": ({"input_ids": torch.tensor([[-1], [-3]])}, "id -1 is out of range"),
    "fewer rows": ({"input_ids": torch.tensor([[1]])}, "holds 2 rows, but a batch of 1"),
    "more rows": ({"input_ids": torch.tensor([[1], [1], [1]])}, "holds 2 rows, but a batch of 3"),
    "a mask of four dimensions": (
        {"input_ids": torch.tensor([[1], [1]]), "attention_mask": torch.ones(2, 1, 1, 21)},
        r"attention_mask must be \[batch, tokens\]",
    ),
    "a mask for other columns": (
        {"input_ids": torch.tensor([[1], [1]]), "attention_mask": torch.ones(2, 20)},
        r"attention_mask has the shape \[2, 20\].*need \[2, 21\]",
    ),
    "a mask for other rows": (
        {"input_ids": torch.tensor([[1], [1]]), "attention_mask": torch.ones(1, 21)},
        r"attention_mask has the shape \[1, 21\]",
    ),
    "a mask that denies what was fed": (
        {
            "input_ids": torch.ones(2, 2, dtype=torch.int64),
            "attention_mask": torch.tensor([[1] * 22, [1] * 17 + [0] * 3 + [1] * 2]),
        },
        "row 1 should continue after 17 tokens, but its stream has seen 20",
    ),
    "no cache to be used": (
        {"input_ids": torch.tensor([[1], [1]]), "use_cache": False},
        "use_cache",
    ),
    "positions from the start": (
        {"input_ids": torch.tensor([[1], [1]]), "position_ids": torch.tensor([[0]])},
        "row 0 should continue after 0 tokens, but its stream has seen 20",
    ),
    "positions of one row too far": (
        {"input_ids": torch.tensor([[1], [1]]), "position_ids": torch.tensor([[20], [21]])},
        "row 1 should continue after 21 tokens",
    ),
    "positions that begin again": (
        {
            "input_ids": torch.ones(2, 4, dtype=torch.int64),
            "position_ids": torch.tensor([[20, 21, 0, 1]]),
        },
        "must rise by one",
    ),
}


@pytest.mark.parametrize("what", BAD_CALLS)
@pytest.mark.thinned(1)
def test_a_bad_call_is_refused_in_one_line_and_leaves_the_stream_as_it_was(
    llama, ids, half_way, what
):
    bad, reason = BAD_CALLS[what]
    before = half_way.seen
    with pytest.raises(WeirError, match=reason) as caught:
        llama(**bad, past_key_values=half_way)
    assert len(str(caught.value).splitlines()) == 1
    assert half_way.seen == before
    whole = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    wanted = fed(llama, whole, ids(2, 30))
    close_runs(fed(llama, half_way, ids(2, 30)[:, 20:]), wanted[:, 20:], llama)


@pytest.mark.parametrize("length", [1, 7])
def test_a_token_that_there_is_not_is_its_row_s_own_affair(llama, ids, half_way, length):
    tokens = ids(2, 30)
    bad = tokens[:, 20 : 20 + length].clone()
    bad[1, -1] = 61
    with torch.no_grad(), pytest.raises(WeirError, match=rf"row 1, token {length} .*id 61 is out"):
        llama(bad, past_key_values=half_way)
    assert half_way.seen == [20 + length, 20]
    mask = torch.tensor([[0] * length, [1] * length])
    fed(llama, half_way, tokens[:, 20 : 20 + length], mask=mask)
    whole = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    wanted = fed(llama, whole, tokens)
    close_runs(fed(llama, half_way, tokens[:, 20 + length :]), wanted[:, 20 + length :], llama)


def test_a_bad_first_call_leaves_the_cache_free_for_any_batch(llama, ids):
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)")
    with pytest.raises(WeirError, match="attention_mask"):
        llama(ids(3, 5), attention_mask=torch.ones(3, 4), past_key_values=cache)
    assert fed(llama, cache, ids(1, 5)).isfinite().all()


def test_a_prompt_of_zero_tokens_is_refused(llama):
    with pytest.raises(WeirError, match="a prompt must have at least one token, got none"):
        llama(torch.zeros(1, 0, dtype=torch.int64), past_key_values=weir.StreamingCache(llama))


def test_an_unbatched_call_is_refused(llama):
    cache = weir.StreamingCache(llama, "recent(8)")
    with pytest.raises(WeirError, match=r"must be \[batch, tokens\]"):
        llama(torch.tensor([1, 2, 3]), past_key_values=cache)


def test_a_cache_serves_one_model_only(llama, shallow, ids):
    cache = weir.StreamingCache(llama, "recent(8)")
    with pytest.raises(WeirError, match="another model"):
        shallow(ids(1, 3), past_key_values=cache)
    shallows = weir.StreamingCache(shallow, "recent(8)")
    with pytest.raises(WeirError, match="another model"):
        shallow(ids(1, 3), past_key_values=cache)
    assert fed(llama, cache, ids(1, 3)).isfinite().all()
    assert fed(shallow, shallows, ids(1, 3)).isfinite().all()


def test_a_detached_cache_says_so(fresh_llama, ids):
    model = fresh_llama()
    cache = weir.StreamingCache(model, "recent(8)")
    cache.detach()
    with pytest.raises(WeirError, match="detached"):
        model(ids(1, 3), past_key_values=cache)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chunk": 0}, "chunk must be a whole number of at least 1, got 0"),
        ({"chunk": 2.0}, "chunk must be a whole number"),
        ({"chunk": True}, "chunk must be a whole number"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"origin": -1}, "origin must be a whole number of at least 0"),
        ({"positions": "relative"}, "positions must be 'rolling' or 'original', got 'relative'"),
        ({"prefill": "none"}, "prefill must be 'chunked' or 'full', got 'none'"),
        ({"policy": "recnet(8)"}, "did you mean 'recent'"),
        ({"policy": 7}, "a policy must be a text"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(llama, options, reason):
    with pytest.raises(WeirError, match=reason):
        weir.StreamingCache(llama, **options)


def test_a_budget_beyond_all_memory_is_refused(llama, ids):
    far = 100_000_000_000_000
    for batch, budget, chunk in ((None, far, 64), (3, far, 64), (None, 8, far)):
        with pytest.raises(WeirError, match="smaller budget or chunk, or fewer rows") as caught:
            weir.StreamingCache(llama, f"recent({budget})", chunk=chunk, batch=batch)
        assert len(str(caught.value).splitlines()) == 1


def test_cropping_and_rolling_back_are_refused(half_way):
    assert half_way.is_croppable is False
    with pytest.raises(WeirError, match="cannot be cropped"):
        half_way.crop(-1)
    with pytest.raises(WeirError, match="assisted and prompt-lookup"):
        half_way.activate_past_recording()


def test_layers_that_do_not_exist_hold_nothing(llama, half_way):
    with pytest.raises(WeirError, match=r"layer 2 does not exist\. The model's layers are 0 to 1"):
        half_way.slots(2)
    with pytest.raises(WeirError, match="nothing was fed"):
        weir.StreamingCache(llama, "recent(8)").slots()


# --- interruptions


@contextmanager
def failing(model: PreTrainedModel, error: BaseException) -> Iterator[None]:
    """Make the last layer raise after its attention, so that the call fails at its end."""

    def fail(*args: object) -> None:
        raise error

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    try:
        with pytest.raises(type(error)):
            yield
    finally:
        handle.remove()


ERRORS = pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])


@ERRORS
@pytest.mark.parametrize("width", [1, 3, 6, 10])
@pytest.mark.parametrize(
    "policy",
    ["sink(3) | recent(8)", "sink(2) | recent(4) | heavy(6)", "recent(6) | balance(8, block=4)"],
)
@pytest.mark.thinned(1)
def test_a_call_that_failed_loses_nothing(llama, ids, error, width, policy):
    tokens, wrong = ids(2, 30), ids(2, 10, seed=1)
    cache, whole = (weir.StreamingCache(llama, policy, chunk=4) for _ in range(2))
    wanted = fed(llama, whole, tokens)
    fed(llama, cache, tokens[:, :22])
    with failing(llama, error):
        llama(wrong[:, :width], past_key_values=cache)
    close_runs(fed(llama, cache, tokens[:, 22:]), wanted[:, 22:], llama)
    for layer in range(2):
        mine, other = cache.slots(layer), whole.slots(layer)
        assert torch.equal(mine.position, other.position)
        close_runs(mine.a, other.a, llama)
        close_runs(mine.b, other.b, llama)


@ERRORS
def test_a_call_of_a_snap_pool_that_failed_keeps_the_last_queries(llama, ids, error):
    tokens, wrong = ids(1, 40), ids(1, 6, seed=1)
    policy = "snap(16, 4, 5)"
    cache, whole = (weir.StreamingCache(llama, policy, chunk=4) for _ in range(2))
    wanted = fed(llama, whole, tokens)
    fed(llama, cache, tokens[:, :22])
    for width in (1, 6):
        with failing(llama, error):
            llama(wrong[:, :width], past_key_values=cache)
    close_runs(fed(llama, cache, tokens[:, 22:]), wanted[:, 22:], llama)


def test_a_fold_that_failed_is_remembered_until_reset(llama, ids, half_way, monkeypatch):
    tokens = ids(2, 30)
    with monkeypatch.context() as patch:
        patch.setattr(Recent, "fold", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llama(tokens[:, 20:24], past_key_values=half_way)
    for call in (half_way.take_rows, half_way.slots, half_way.report):
        with pytest.raises(WeirError, match=r"interrupted during a fold. Call reset"):
            call()
    half_way.reset()
    whole = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    close_runs(fed(llama, half_way, tokens), fed(llama, whole, tokens), llama)


@ERRORS
def test_a_first_call_that_failed_never_happened(llama, ids, error):
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    with failing(llama, error):
        llama(ids(3, 30), past_key_values=cache)
    whole = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    tokens = ids(1, 30, seed=1)
    close_runs(fed(llama, cache, tokens), fed(llama, whole, tokens), llama)


@ERRORS
def test_after_an_interruption_the_model_is_as_it_was(fresh_llama, ids, error):
    model, tokens = fresh_llama(), ids(1, 30)
    before = model.config._attn_implementation
    with torch.no_grad():
        wanted = model(tokens).logits
    cache = weir.StreamingCache(model, "sink(3) | recent(8)", chunk=4)
    with failing(model, error):
        model(tokens, past_key_values=cache)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, wanted)
        dynamic = DynamicCache()
        model(tokens[:, :20], past_key_values=dynamic)
        close_runs(model(tokens[:, 20:], past_key_values=dynamic).logits, wanted[:, 20:], model)
    assert model.config._attn_implementation == before


# --- several caches of one model, hooks and copies


def test_a_model_with_caches_is_as_it_was_in_calls_without_one(fresh_llama, ids):
    model, tokens = fresh_llama(), ids(2, 20)
    with torch.no_grad():
        wanted = model(tokens).logits
    before = model.config._attn_implementation
    cache = weir.StreamingCache(model, "sink(3) | recent(8)", chunk=4)
    fed(model, cache, tokens)
    assert model.config._attn_implementation == before
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, wanted)


def test_several_caches_of_one_model_do_not_meet(llama, ids):
    texts = ["sink(3) | recent(8)", "window(6)", "dense"]
    tokens = [ids(n + 1, 40, seed=n) for n in range(3)]
    caches = [weir.StreamingCache(llama, text, chunk=4) for text in texts]
    parts: list[list[Tensor]] = [[], [], []]
    with torch.no_grad():
        for step in range(40):
            for n, cache in enumerate(caches):
                out = llama(tokens[n][:, step : step + 1], past_key_values=cache)
                parts[n].append(out.logits)
    for n, text in enumerate(texts):
        alone = fed(llama, weir.StreamingCache(llama, text, chunk=4), tokens[n])
        close_runs(torch.cat(parts[n], dim=1), alone, llama)


def test_the_hooks_go_with_the_last_cache(fresh_llama, ids):
    model = fresh_llama()

    def hooks() -> int:
        return sum("forward" in vars(m) for m in model.modules())

    first = weir.StreamingCache(model, "recent(8)")
    second = weir.StreamingCache(model, "recent(8)")
    fed(model, first, ids(1, 20))
    assert hooks() > 0
    del first
    gc.collect()
    assert hooks() > 0
    fed(model, second, ids(1, 20))
    del second
    gc.collect()
    assert hooks() == 0


def test_a_detached_model_has_no_hooks(fresh_llama):
    model = fresh_llama()
    cache = weir.StreamingCache(model, "recent(8)")
    cache.detach()
    assert not any("forward" in vars(m) for m in model.modules())


def test_a_model_can_be_collected_while_a_cache_lives(fresh_llama):
    model = fresh_llama()
    cache = weir.StreamingCache(model, "recent(8)")
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None
    with pytest.raises(WeirError, match="model that this cache was made for no longer exists"):
        copy.deepcopy(cache)


MODES: list[Callable[[], object]] = [torch.inference_mode, torch.no_grad, torch.enable_grad]


@pytest.mark.parametrize("text", ["sink(3) | recent(8)", "dense"])
def test_inference_mode_no_grad_and_grad_share_a_cache(llama, ids, text):
    tokens = ids(2, 60)
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    cache = weir.StreamingCache(llama, text, chunk=4)
    parts = []
    for step in range(12):
        with MODES[(step * 5 + step // 3) % 3]():
            segment = slice(5 * step, 5 * step + 5)
            out = llama(
                tokens[:, segment], attention_mask=mask[:, : segment.stop], past_key_values=cache
            )
            parts.append(out.logits.detach().clone())
            cache.reorder_cache(torch.tensor([0, 1]))
    wanted = fed(llama, weir.StreamingCache(llama, text, chunk=4), tokens, mask=mask)
    got = torch.cat(parts, dim=1)
    close_runs(got[0], wanted[0], llama)
    close_runs(got[1, 7:], wanted[1, 7:], llama)


def test_a_reset_cache_is_a_new_one(llama, ids):
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    mask = torch.ones(3, 30)
    mask[1, :9] = 0
    fed(llama, cache, ids(3, 30), mask=mask)
    cache.reset()
    assert (cache.seen, cache.nbytes, cache.get_seq_length(), cache.batch) == ([], 0, 0, None)
    tokens = ids(2, 30, seed=4)
    new = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    assert torch.equal(fed(llama, cache, tokens), fed(llama, new, tokens))
    same_slots(cache, new, llama)


def test_a_deep_copy_goes_its_own_way(llama, ids):
    tokens = ids(2, 60)
    prompt = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4, seed=3, origin=9)
    fed(llama, prompt, tokens[:, :27])
    before = prompt.slots(1)
    twin = copy.deepcopy(prompt)
    got = fed(llama, twin, tokens[:, 27:])
    after = prompt.slots(1)
    assert torch.equal(before.keys, after.keys) and prompt.seen == [27, 27]
    assert torch.equal(fed(llama, prompt, tokens[:, 27:]), got)
    same_slots(prompt, twin, llama)
    fresh = copy.deepcopy(weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4, origin=9))
    keeps = weir.StreamingCache(llama, "sink(3) | recent(8)", failures="keep")
    assert fresh.failures == "raise" and copy.deepcopy(keeps).failures == "keep"
    close_runs(fed(llama, fresh, tokens)[:, 27:], got, llama)
    rows = copy.deepcopy(weir.StreamingCache(llama, "sink(3) | recent(8)", batch=2))
    rows.reset()
    assert rows.batch == 2


@pytest.mark.parametrize("row", [7, -1, "a"])
def test_a_report_of_a_row_that_does_not_exist_is_refused(llama, ids, row):
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)")
    fed(llama, cache, ids(2, 5))
    with pytest.raises(WeirError, match=r"does not exist\. The rows are 0 to 1"):
        cache.report(row)


def test_pickles_and_shallow_copies_are_refused(half_way):
    for act in (pickle.dumps, copy.copy):
        with pytest.raises(WeirError, match="pickled"):
            act(half_way)


# --- reports


def test_it_tells_what_it_holds(llama, ids):
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    fed(llama, cache, ids(1, 30))
    held = cache.slots(layer=1)
    assert held.pools == ("sink", "recent", "new")
    assert held.position[0, 0].tolist() == [0, 1, 2, *range(20, 30)]
    assert held.pool[0, 0].tolist() == [0] * 3 + [1] * 8 + [2] * 2
    assert held.a.eq(0).all() and held.b.eq(0).all() and held.mass is None
    assert held.keys.shape == held.values.shape == (1, 2, 13, 16)


def test_rows_of_different_lengths_are_told_apart(llama, ids):
    tokens = ids(2, 30)
    mask = torch.ones_like(tokens)
    mask[1, :17] = 0
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    fed(llama, cache, tokens, mask=mask)
    held = cache.slots()
    assert held.position[1, 0].tolist() == [0, 1, 2, *range(4, 13), -1]
    assert held.pool[1, 0].tolist() == [0] * 3 + [1] * 8 + [2, -1]
    assert held.a[1, 0, -1].isneginf()


def test_what_it_holds_is_a_copy(llama, ids):
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    fed(llama, cache, ids(1, 30))
    for name in ("position", "a", "b", "keys", "values", "pool"):
        getattr(cache.slots(), name).fill_(7)
    again = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    fed(llama, again, ids(1, 30))
    same_slots(cache, again, llama)


def test_its_report_counts_bytes_tokens_and_slots(llama, ids):
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    assert cache.report()["bytes"] == 0
    fed(llama, cache, ids(1, 30))
    report = cache.report()
    assert (report["policy"], report["chunk"], report["seen"]) == ("sink(3) | recent(8)", 4, [30])
    assert report["bytes"] == cache.nbytes == sum(layer["bytes"] for layer in report["layers"])
    assert report["layers"][0]["slots"] == {"sink": 3, "recent": 8, "new": 2}


def test_transformers_is_told_the_truth(llama, ids):
    cache = weir.StreamingCache(llama, "sink(3) | recent(8)", chunk=4)
    assert (cache.get_seq_length(), cache.is_initialized, cache.batch_size) == (0, False, -1)
    fed(llama, cache, ids(2, 30))
    assert (cache.get_seq_length(), cache.is_initialized, cache.batch_size) == (30, True, 2)
    assert cache.get_query_offset() == 30 and cache.get_mask_sizes(5) == (5, 0)
    assert cache.get_max_length() == -1
    assert not cache.is_compileable and not cache.is_croppable


# --- truth value and repr


def test_a_new_cache_is_true_and_has_as_many_layers_as_the_model(llama):
    cache = weir.StreamingCache(llama)
    assert cache and len(cache) == 2


def test_a_cache_says_in_one_line_what_it_is(llama, ids):
    cache = weir.StreamingCache(llama, "sink(4)\n| recent(12)", chunk=5)
    new = "<weir.StreamingCache sink(4) | recent(12), chunk 5: 0 tokens seen, 0 bytes>"
    assert repr(cache) == new
    mask = torch.ones(6, 1200, dtype=torch.int64)
    mask[1, :3] = 0
    fed(llama, cache, ids(6, 1200), mask=mask)
    seen = "1,200 and 1,197 and 1,200 and 1,200 and 2 rows more tokens seen"
    assert f"chunk 5: {seen}, {cache.nbytes:,} bytes>" in repr(cache)
    many = weir.StreamingCache(llama, " | ".join(["recent(4)"] * 30))
    assert len(repr(many)) < 150


# --- the base model inside a model


def test_caches_of_a_model_and_of_its_base_model_do_not_disturb_each_other(fresh_llama, ids):
    model = fresh_llama()
    base, text = model.base_model, ids(1, 40)
    with torch.no_grad():
        plain = model(text).logits
        alone = weir.StreamingCache(model, "sink(2) | recent(12)", chunk=4)
        expected = model(text, past_key_values=alone, output_hidden_states=True)
        whole, inner = (
            weir.StreamingCache(it, "sink(2) | recent(12)", chunk=4) for it in (model, base)
        )
        found = base(text[:, :20], past_key_values=inner).last_hidden_state
        logits = model(text, past_key_values=whole).logits
        rest = base(text[:, 20:], past_key_values=inner).last_hidden_state
        assert torch.equal(logits, expected.logits)
        both = torch.cat([found, rest], dim=1)
        close_runs(both, expected.hidden_states[-1], model)
        assert not torch.equal(logits, plain)
        del alone, whole, expected
        assert model.config._attn_implementation != "weir"
        again = weir.StreamingCache(base, "sink(2) | recent(12)", chunk=4)
        assert torch.equal(model(text, past_key_values=again).logits, logits)
        inner.detach()
        del again
        assert not base._forward_pre_hooks
        assert torch.equal(model(text).logits, plain)
