"""Tokens that are dropped: no attention reads them any more, and no pool keeps them."""

from __future__ import annotations

import pytest
import torch
from reference.naive import make_llama
from roundings import run_off
from test_every_pool import PIPES

import weir
from weir.errors import WeirError

START, STOP = 20, 33
TEXTS = [
    text
    for texts in PIPES.values()
    for text in texts
    if "none" not in text.partition("recent(")[2][:5] and "gated" not in text
]


def ids(length: int, seed: int = 0) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(0, 61, (1, length), generator=draws)


def droppable(text: str) -> bool:
    return weir.StreamingCache(make_llama(layers=1), text, chunk=4).why_not_drop() is None


CAN = [text for text in TEXTS if droppable(text)]


def near(found, wanted, model) -> None:
    """Assert that logits differ by rounding only."""
    assert (found - wanted).abs().max() <= run_off(model) * wanted.abs().max()


def held_places(cache, row: int = 0) -> set[int]:
    return {held.token for held in cache.holding(row).tokens()}


def feed(model, cache, tokens):
    with torch.no_grad():
        return model(tokens, past_key_values=cache, use_cache=True).logits[:, -1]


def test_most_policies_can_drop():
    names = {text.rpartition("| ")[2].partition("(")[0] for text in CAN}
    assert {"recent", "heavy", "kcenter", "hive", "snap", "tova", "reservoir", "header"} <= names
    assert {"subgen", "balance", "residue", "match", "tail"}.isdisjoint(names)


@pytest.mark.parametrize("text", CAN)
@pytest.mark.thinned(3)
def test_no_pool_keeps_what_was_dropped(text):
    model = make_llama(layers=2)
    cache = weir.StreamingCache(model, text, chunk=4)
    feed(model, cache, ids(34))
    assert held_places(cache) & set(range(START, STOP))
    before = held_places(cache)
    cache.drop(0, [(START, STOP)])
    assert held_places(cache) == before - set(range(START, STOP))
    assert cache.count_held(0) == len(held_places(cache))
    cache.drop(0, [(START, STOP)])  # again
    after = feed(model, cache, ids(1, seed=1))
    assert after.isfinite().all()
    # A row that is put into another cache passes its checks there and goes on in the same way.
    other = weir.StreamingCache(model, text, chunk=4)
    other.put_row(0, cache.take_row(0), check=True)
    for seed, length in enumerate((1, 5, 1, 1, 30, 1, 40), 2):
        more = ids(length, seed)
        one, two = feed(model, cache, more), feed(model, other, more)
        near(one, two, model)
        assert not held_places(cache) & set(range(START, STOP))
        other.put_row(0, cache.take_row(0), check=True)


@pytest.mark.parametrize(
    "text", ["sink(2) | recent(60)", "recent(60)", "sink(2) | recent(20) | kcenter(40)", "snap(60)"]
)
@pytest.mark.parametrize("together", [True, False])
def test_below_the_budget_it_is_attention_without_these_tokens(text, together):
    model = make_llama(layers=1)
    # Rolling positions close the gaps that evicted tokens leave in front of the newest ones.
    cache = weir.StreamingCache(model, text, chunk=4, positions="original")
    first, more = ids(34), ids(11, seed=1)
    feed(model, cache, first)
    cache.drop(0, [(START, STOP)])
    if together:
        found = feed(model, cache, more)
    else:
        for at in range(more.shape[1]):
            found = feed(model, cache, more[:, at : at + 1])
    whole = torch.cat([first, more], dim=1)
    length = whole.shape[1]
    sees = torch.ones(length, length).tril().bool()
    sees[34:, START:STOP] = False
    mask = torch.zeros(1, 1, length, length).masked_fill(~sees, -torch.inf)
    with torch.no_grad():
        wanted = model(whole, attention_mask=mask, use_cache=False).logits[:, -1]
    near(found, wanted, model)
    with torch.no_grad():
        unchanged = model(whole, use_cache=False).logits[:, -1]
    assert (found - unchanged).abs().max() > 100 * (found - wanted).abs().max()


@pytest.mark.parametrize("slots", ["int8", "int4", "fp8"])
def test_quantized_slots_are_dropped_too(slots):
    model = make_llama(layers=1)
    cache = weir.StreamingCache(model, f"sink(2) | recent(4) | recent(56):{slots}", chunk=4)
    feed(model, cache, ids(40))
    cache.drop(0, [(START, STOP)])
    state = cache.take_row(0)
    other = ids(40).clone()
    other[:, START:STOP] = ids(STOP - START, seed=5)
    twin = weir.StreamingCache(model, f"sink(2) | recent(4) | recent(56):{slots}", chunk=4)
    feed(model, twin, other)
    twin.drop(0, [(START, STOP)])
    # No buffer still contains anything of the dropped tokens.
    for name, t in twin.take_row(0).tensors.items():
        assert torch.equal(t, state.tensors[name]), name
    more = ids(9, seed=1)
    assert torch.equal(feed(model, cache, more), feed(model, twin, more))


def test_rows_are_dropped_from_alone_and_fold_together():
    model = make_llama(layers=1)
    cache = weir.StreamingCache(model, "sink(2) | recent(12) | heavy(8)", chunk=4, batch=2)
    both = torch.cat([ids(34), ids(34, seed=9)])
    feed(model, cache, both)
    cache.drop(0, [(START, STOP), (4, 6)])
    assert held_places(cache, 1) & set(range(START, STOP))
    alone = weir.StreamingCache(model, "sink(2) | recent(12) | heavy(8)", chunk=4)
    feed(model, alone, both[1:])
    for seed in range(8):
        more = torch.cat([ids(3, seed), ids(3, seed + 50)])
        found = feed(model, cache, more)
        near(found[1:], feed(model, alone, more[1:]), model)
        assert not held_places(cache, 0) & {4, 5, *range(START, STOP)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("recent(4) | subgen(8, clusters=4, per_cluster=2)", "subgen"),
        ("recent(2) | balance(8, halves=authors, sets=flat)", "balance"),
        ("recent(4) | residue(6, window=4)", "residue"),
        ("recent(4) | match(heavy(6), window=4)", "match"),
        ("recent(4) | reservoir(6, weighted=true)", "reservoir"),
        ("dense", "every token"),
    ],
)
def test_policies_that_cannot_drop_are_named(text, words):
    model = make_llama(layers=1)
    cache = weir.StreamingCache(model, text, chunk=4)
    feed(model, cache, ids(3))
    with pytest.raises(WeirError, match=words):
        cache.drop(0, [(2, 3)])


@pytest.mark.parametrize("span", [(-1, 3), (3, 2), (5, 41), (0, 2**70), ("a", 3), (None, None)])
def test_places_that_are_none_are_refused(span):
    model = make_llama(layers=1)
    cache = weir.StreamingCache(model, "recent(8)", chunk=4)
    feed(model, cache, ids(40))
    with pytest.raises(WeirError, match="cannot be dropped"):
        cache.drop(0, [span])
    with pytest.raises(WeirError):
        cache.drop(1, [(0, 1)])
