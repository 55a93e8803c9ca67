"""A tail that is watched as it is read: answers, shares and mass are those of a plain softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from reference.models import make, tokens
from roundings import largest, off, softmax_off, within

import weir
from weir import kernels
from weir.cache.layer import attention, layer
from weir.cache.layer.mask import band
from weir.pools import ObservedAttention

CHUNK = 8
POLICY = "sink(2) | recent(8) | heavy(16)"
WINDOW = 16


def naive(spec, slab, queries, form, bias, stop):
    """Answers, shares over all slots and their mass, in float64."""
    keys, values = (t.double() for t in slab.read(0, stop))
    logits = torch.einsum("bhgld,bhnd->bhgln", queries.double(), keys) * form.scale
    logits += slab.b[:, :, None, None, :stop].double()
    if spec.positions.alibi is not None:
        logits += bias.double()  # causality is in it, too
    else:
        ahead = torch.arange(stop - spec.chunk, stop)[:, None] - torch.arange(stop)
        window = spec.positions.window or math.inf
        logits.masked_fill_((ahead < 0) | (ahead >= window), -math.inf)
    shares = logits.softmax(dim=-1)
    answers = torch.einsum("bhgln,bhnd->bhgld", shares, values)
    return answers, shares, shares.sum(dim=(2, 3))


@dataclass
class Call:
    """A call of `watch` that has answered."""

    start: int
    stop: int
    quantized: bool


@pytest.fixture
def spied(monkeypatch):
    """Makes `watch` be compared with the naive one at every call, in a window if one is named."""
    calls = []

    def use(window: int | None = None) -> list[Call]:
        def spy(spec, slab, queries, form, bias, slots):
            start, stop = slots
            if window is not None:
                spec = replace(spec, positions=replace(spec.positions, window=window))
                bias = band(CHUNK, stop, window, torch.float32, queries.device)
            got = attention.observe(spec, slab, queries, form, bias, slots)
            if got is not None:
                calls.append(Call(start, stop, slab.quantized is not None))
                compare(got, spec, slab, queries, form, bias, slots)
            return got

        monkeypatch.setattr(layer, "observe", spy)
        return calls

    return use


def compare(got, spec, slab, queries, form, bias, slots):
    """Answers, shares and mass are the naive ones, to rounding."""
    start, stop = slots
    answers, shares, mass = naive(spec, slab, queries, form, bias, stop)
    keys, values = slab.read(0, stop)
    logit = math.prod(float(t.norm(dim=-1).max()) for t in (queries, keys)) * form.scale
    if spec.positions.alibi is not None:
        logit += largest(bias)
    bound = softmax_off(queries.shape[4], logit) + off(stop)
    assert (got.shares is None) == (spec.chunk > CHUNK)
    if got.shares is None:
        voted = shares[:, :, :, -WINDOW:].sum(dim=(2, 3))
        within(got.of_last(WINDOW), voted, bound * queries.shape[2] * WINDOW)
        assert got.of_last(WINDOW - 1) is None
    else:
        within(got.shares, shares[..., start:], bound)
    within(got.mass, mass, bound * queries.shape[2] * spec.chunk)
    within(got.answers, answers, bound * largest(values))


def feed(name: str, policy: str, chunk: int = CHUNK, **changes: int) -> None:
    weir.Stream(make(name, **changes), policy, chunk=chunk).feed(tokens(2, 70))


def test_a_tail_sees_all_slots_before_it_and_itself_up_to_each_query(spied):
    calls = spied()
    feed("llama", POLICY)
    assert {call.stop for call in calls} == {8, 16, 24, 32, 34}


def test_quantized_slots_are_watched_as_they_are_read_and_left_out_while_nobody_uses_them(spied):
    calls = spied()
    feed("llama", f"quantized({POLICY}, slots=int8)")
    starts = {call.start for call in calls}
    assert all(call.quantized for call in calls)
    assert min(starts) == 0 < max(starts)


@pytest.mark.parametrize("policy", [POLICY, f"quantized({POLICY}, slots=int8)"])
def test_a_kernel_tells_what_slots_received_and_keeps_no_shares(spied, policy, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    calls = spied()
    feed("llama", policy, chunk=32, head_dim=16)
    assert len(calls) == 4  # in each of two layers twice


@pytest.mark.parametrize("policy", [POLICY, f"quantized({POLICY}, slots=int8)"])
def test_a_sliding_window_hides_older_slots(spied, policy):
    calls = spied(window=10)
    feed("llama", policy)
    assert max(call.stop for call in calls) > 10 + CHUNK


def test_linear_biases_reach_all_slots(spied):
    calls = spied()
    feed("mpt", POLICY)
    assert max(call.stop for call in calls) > CHUNK


def test_where_a_query_sees_nothing_the_fold_asks_by_itself(monkeypatch):
    refused = []

    def blind(spec, slab, queries, form, bias, slots):
        kept = slab.b.clone()
        slab.b.fill_(-math.inf)
        refused.append(attention.observe(spec, slab, queries, form, bias, slots))
        slab.b.copy_(kept)
        return refused[-1]

    ids, model = tokens(2, 40), make("llama")
    wanted = weir.Stream(model, POLICY, chunk=CHUNK)
    wanted.feed(ids)
    monkeypatch.setattr(layer, "observe", blind)
    got = weir.Stream(model, POLICY, chunk=CHUNK)
    got.feed(ids)
    assert refused and set(refused) == {None}
    for mine, theirs in zip(got.cache.stack, wanted.cache.stack, strict=True):
        assert torch.equal(mine.slab.position, theirs.slab.position)


def test_votes_that_were_counted_are_those_that_shares_add_up_to(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    counted, received = [], ObservedAttention.received

    def spy(read, slots, window):
        got = received(read, slots, window)
        wanted = read.attention(slots)[:, :, :, -window:].sum(dim=(2, 3))
        sizes = (float(t.norm(dim=-1).max()) for t in (read.asked, read.whole.keys))
        bound = softmax_off(16, math.prod(sizes) * read.form.scale) + off(len(read.whole))
        within(got, wanted, bound * read.asked.shape[2] * window)
        counted.append(read.watched is not None)
        return got

    monkeypatch.setattr(ObservedAttention, "received", spy)
    feed("llama", f"recent(8) | snap(20, window={WINDOW})", chunk=32, head_dim=16)
    assert counted == [True] * 4
