"""Keys and values that are not finite numbers: the token is refused, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from roundings import close_runs, run_off
from torch import Tensor
from transformers import PreTrainedModel

import weir
from weir.cache.layer.transaction import Transaction, finite_columns
from weir.cache.plan import ForwardPlan
from weir.errors import NotFiniteError

BAD = 7
"""The id of the token for which a poisoned model computes numbers that are not finite."""
POLICIES = [
    "sink(2) | recent(8)",
    "dense",
    "sink(2) | recent(6) | heavy(6)",
    "recent(4) | reservoir(8, weighted=true)",
    "snap(16, 4, 5)",
    "sink(2) | recent(4) | balance(8, block=4)",
    "sink(2) | recent(4) | subgen(8, 4, 2)",
    "[[window(9), recent(4) | heavy(6)], [h2o(8), window(12)]]",
]


@contextmanager
def poisoned(
    model: PreTrainedModel, value: float, layer: int, part: str = "k_proj"
) -> Iterator[None]:
    """In one layer, one number of the keys or values of each token `BAD` is `value`."""
    run_off(model)  # what `close_runs` allows is measured while the model is sound
    now: list[Tensor] = []

    def remember(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        now[:] = [kwargs["input_ids"]]

    def spoil(module: Any, args: Any, out: Tensor) -> Tensor:
        out = out.clone()
        out[..., 3] = out[..., 3].masked_fill(now[0] == BAD, value)
        return out

    module = getattr(model.model.layers[layer].self_attn, part)
    handles = [
        model.model.register_forward_pre_hook(remember, with_kwargs=True),
        module.register_forward_hook(spoil),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def good(ids: Any, length: int, seed: int = 0) -> Tensor:
    tokens = ids(1, length, seed=seed)
    return torch.where(tokens == BAD, BAD + 1, tokens)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer", [0, 1])
def test_the_token_is_refused_and_the_stream_goes_on(llama, ids, policy, layer):
    tokens = good(ids, 60)
    stream, other = (weir.Stream(llama, policy, chunk=4) for _ in range(2))
    other.feed(tokens[:, :35])
    wanted = other.feed(tokens[:, 35:], all_logits=True)
    with poisoned(llama, torch.nan, layer):
        stream.feed(tokens[:, :35])
        for _ in range(2):
            with pytest.raises(NotFiniteError, match=rf"\(id {BAD}\).*layer {layer} of the model"):
                stream.feed([BAD])
        assert stream.seen == 35
        got = stream.feed(tokens[:, 35:], all_logits=True)
    close_runs(got, wanted, llama)
    assert torch.equal(stream.slots(1).position, other.slots(1).position)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", ["k_proj", "v_proj"])
def test_no_kind_of_it_gets_in(llama, value, part):
    stream = weir.Stream(llama, "sink(2) | recent(8)", chunk=4)
    stream.feed([1, 2, 3])
    with poisoned(llama, value, 1, part), pytest.raises(NotFiniteError):
        stream.feed([BAD])
    assert stream.seen == 3


@pytest.mark.parametrize("policy", POLICIES)
def test_what_came_before_it_in_the_same_call_stays(llama, ids, policy):
    tokens = good(ids, 60)
    stream, other = (weir.Stream(llama, policy, chunk=4) for _ in range(2))
    wanted = other.feed(tokens)
    wrong = torch.cat([tokens[:, :41], torch.tensor([[BAD]]), tokens[:, 50:]], dim=1)
    with poisoned(llama, torch.nan, 1):
        with pytest.raises(NotFiniteError, match=rf"token 42 of this call \(id {BAD}\)"):
            stream.feed(wrong)
        assert stream.seen == 41
        got = stream.feed(tokens[:, 41:])
    close_runs(got, wanted, llama)


def test_a_first_token_that_is_refused_leaves_a_new_stream(llama, ids):
    stream = weir.Stream(llama, "sink(2) | recent(8)", chunk=4)
    with poisoned(llama, torch.nan, 1), pytest.raises(NotFiniteError, match="token 1 of this call"):
        stream.feed([BAD, 1, 2])
    assert stream.seen == 0
    tokens = good(ids, 30)
    other = weir.Stream(llama, "sink(2) | recent(8)", chunk=4)
    assert torch.equal(stream.feed(tokens), other.feed(tokens))


@pytest.mark.parametrize("at", [0, 1, 9, 30])
@pytest.mark.parametrize("kind", [torch.nan, torch.inf])
def test_a_row_that_fails_is_that_row_s_own_affair(llama, ids, at: int, kind: float):
    first, more = (torch.cat([good(ids, n, seed=s) for s in (0, 1, 2)]) for n in (20, 31))
    stream = weir.Stream(llama, "sink(2) | recent(8) | heavy(4)", chunk=4)
    alone = [weir.Stream(llama, "sink(2) | recent(8) | heavy(4)", chunk=4) for _ in range(3)]
    bad = more.clone()
    bad[1, at] = BAD
    words = rf"token {at + 1} of this call \(id {BAD}\) of row 1 and the tokens after it.*layer 0"
    with poisoned(llama, kind, 0):
        stream.feed(first)
        with pytest.raises(NotFiniteError, match=words) as caught:
            stream.feed(bad)
        for row, one in enumerate(alone):
            one.feed(first[row])
            one.feed(more[row] if row != 1 else more[row, :at]) if row != 1 or at else None
        assert (caught.value.row, caught.value.layer) == (1, 0)
        assert (caught.value.place, caught.value.token) == (at, BAD)
        assert stream.cache.seen == [51, 20 + at, 51]
        assert stream.seen == 51
        assert stream.last == [one.last[0] for one in alone]
        after = torch.cat([good(ids, 15, seed=s) for s in (3, 4, 5)])
        got = stream.feed(after, all_logits=True)
        for row, one in enumerate(alone):
            wanted = one.feed(after[row], all_logits=True)
            close_runs(got[row], wanted[0], llama)
            for layer in range(2):
                mine, theirs = stream.slots(layer), one.slots(layer)
                width = theirs.position.shape[2]
                assert torch.equal(mine.position[row, :, :width], theirs.position[0])


def test_all_rows_that_fail_fail_the_call(llama, ids):
    tokens = torch.cat([good(ids, 20), good(ids, 20, seed=1)])
    stream = weir.Stream(llama, "sink(2) | recent(8)", chunk=4)
    with poisoned(llama, torch.nan, 1):
        stream.feed(tokens)
        with pytest.raises(NotFiniteError, match="token 1 of this call"):
            stream.feed([[BAD], [BAD]])
        assert stream.cache.seen == [20, 20]
        assert stream.feed([[3], [4]]).isfinite().all()


@pytest.mark.parametrize("length", [1, 6])
def test_a_call_goes_on_without_a_row_that_fails_and_says_so_at_its_end(llama, ids, length):
    tokens = torch.cat([good(ids, 20), good(ids, 20, seed=1)])
    more = torch.cat([good(ids, length, seed=2), good(ids, length, seed=3)])
    bad = more.clone()
    bad[0, -1] = BAD
    cache, kept, whole = (
        weir.StreamingCache(llama, "sink(2) | recent(8)", chunk=4, failures=failures)
        for failures in ("raise", "keep", "raise")
    )
    with torch.no_grad(), poisoned(llama, torch.nan, 1):
        for one in (cache, kept, whole):
            llama(tokens, past_key_values=one)
        with pytest.raises(NotFiniteError, match="row 0 were refused: layer 1"):
            llama(bad, past_key_values=cache)
        got = llama(bad, past_key_values=kept).logits
        wanted = llama(more, past_key_values=whole).logits
        assert cache.seen == kept.seen == [20, 20 + length]
        assert list(kept.failed) == [0] and isinstance(kept.failed[0], NotFiniteError)
        close_runs(got[1], wanted[1], llama)
        for one in (cache, kept):
            again = llama(more[:1].expand(2, -1), past_key_values=one).logits
            close_runs(again[0], wanted[0], llama)
        assert kept.failed == {}


def test_generate_of_transformers_is_told_and_the_cache_is_as_it_was(llama, ids):
    tokens = good(ids, 30)
    cache = weir.StreamingCache(llama, "sink(2) | recent(8)", chunk=4)
    with torch.no_grad(), poisoned(llama, torch.inf, 1):
        llama(tokens[:, :20], past_key_values=cache)
        wrong = torch.cat([tokens[:, 20:29], torch.tensor([[BAD]])], dim=1)
        with pytest.raises(NotFiniteError, match="the tokens of this call were refused"):
            llama(wrong, past_key_values=cache)
        got = llama(tokens[:, 20:], past_key_values=cache).logits
    whole = weir.StreamingCache(llama, "sink(2) | recent(8)", chunk=4)
    with torch.no_grad():
        wanted = llama(tokens, past_key_values=whole).logits[:, 20:]
    close_runs(got, wanted, llama)


def test_a_row_without_an_embedding_is_not_fed_when_another_row_fails_too(llama, ids):
    tokens = torch.cat([good(ids, 6, seed=s) for s in (0, 1, 2)])
    tokens[0, 2], tokens[1, 3] = 61, BAD
    cache = weir.StreamingCache(llama, "sink(2) | recent(8)", chunk=4, failures="keep")
    with torch.no_grad(), poisoned(llama, torch.nan, 1):
        llama(tokens, past_key_values=cache)
    assert cache.seen == [0, 0, 6]
    assert sorted(cache.failed) == [0, 1]


def test_where_numbers_are_looked_at_late_a_refused_call_leaves_none_behind(
    llama, ids, monkeypatch
):
    """On an accelerator, numbers are stored before they are checked, and removed if refused."""

    def late(running: Transaction, keys: Tensor, values: Tensor, plan: ForwardPlan) -> None:
        looked = [keys, values] if plan.step else [finite_columns(keys, values)]
        running.unchecked = looked

    monkeypatch.setattr(Transaction, "check_finite", late)
    cache = weir.StreamingCache(llama, "sink(2) | recent(6)", chunk=8, batch=2, failures="keep")
    tokens = torch.cat([good(ids, 13), good(ids, 13, seed=1)])
    bad = tokens[:, :3].clone()
    bad[1, 1] = BAD
    with torch.no_grad(), poisoned(llama, torch.nan, 0):
        llama(tokens, past_key_values=cache)
        llama(bad, past_key_values=cache)
    assert list(cache.failed) == [1]
    assert cache.seen == [16, 13]
    for layer in cache.stack:
        assert bool(layer.state.slab.keys.isfinite().all())
        assert bool(layer.state.slab.values.isfinite().all())
    cache.put_row(1, cache.take_row(1))
