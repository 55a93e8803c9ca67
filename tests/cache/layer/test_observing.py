"""Attention that also records what slots receive equals a plain softmax: answers, shares, mass."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from reference.models import make, tokens
from roundings import largest, off, softmax_off, within

import weir
from weir import kernels
from weir.cache.layer import layer
from weir.cache.layer.attention import band
from weir.pools import ObservedAttention
from weir.slab import AttendedSlots, compute_attention

CHUNK = 8
POLICY = "sink(2) | recent(8) | heavy(16)"
WINDOW = 16


def compare(got, queries, slots, params, bias):
    """Check that answers, shares and mass are those of a softmax in float64, up to rounding."""
    keys, values = (t.double() for t in replace(slots, start=0).read())
    logits = torch.einsum("bhgld,bhnd->bhgln", queries.double(), keys) * params.scale
    logits += slots.b[:, :, None, None, : slots.stop].double() + bias.double()
    shares = logits.softmax(dim=-1)
    answers = torch.einsum("bhgln,bhnd->bhgld", shares, values)
    bound = softmax_off(queries.shape[4], largest(logits[logits.isfinite()])) + off(slots.stop)
    group, width = queries.shape[2:4]
    assert (got.shares is None) == (width > CHUNK)
    if got.shares is None:
        voted = shares[:, :, :, -WINDOW:].sum(dim=(2, 3))
        within(got.of_last(WINDOW), voted, bound * group * WINDOW)
        assert got.of_last(WINDOW - 1) is None
    else:
        within(got.shares, shares[..., slots.start :], bound)
    within(got.mass, shares.sum(dim=(2, 3)), bound * group * width)
    within(got.answers, answers, bound * largest(values))


@pytest.fixture
def spied(monkeypatch):
    """Check each call that observes attention with `compare`, in a sliding window if given one."""
    calls = []

    def use(window: int | None = None) -> list[AttendedSlots]:
        def spy(queries, slots, params, bias, *, causal=False, observe=""):
            if window is not None and observe:
                causal = False
                bias = band(CHUNK, slots.stop, window, torch.float32, queries.device)
            how = {"causal": causal, "observe": observe}
            got = compute_attention(queries, slots, params, bias, **how)
            if got.received is not None:
                calls.append(slots)
                compare(got, queries, slots, params, bias)
            return got

        monkeypatch.setattr(layer, "compute_attention", spy)
        return calls

    return use


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
    assert all(call.quantized is not None for call in calls)
    assert min(starts) == 0 < max(starts)


@pytest.mark.parametrize("policy", [POLICY, f"quantized({POLICY}, slots=int8)"])
def test_a_kernel_tells_what_slots_received_and_keeps_no_shares(spied, policy, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    calls = spied()
    feed("llama", policy, chunk=32, head_dim=16)
    assert len(calls) == 4  # twice in each of the two layers


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
    observed = []

    def blind(queries, slots, params, bias, **how):
        if how.pop("observe", ""):
            unseen = replace(slots, b=torch.full_like(slots.b, -math.inf), plain=False)
            asked = compute_attention(queries, unseen, params, bias, observe="received", **how)
            observed.append(asked)
        return compute_attention(queries, slots, params, bias, **how)

    ids, model = tokens(2, 40), make("llama")
    wanted = weir.Stream(model, POLICY, chunk=CHUNK)
    wanted.feed(ids)
    monkeypatch.setattr(layer, "compute_attention", blind)
    got = weir.Stream(model, POLICY, chunk=CHUNK)
    got.feed(ids)
    assert observed and all(it.received is None and not it.answers.any() for it in observed)
    for mine, theirs in zip(got.cache.stack, wanted.cache.stack, strict=True):
        assert torch.equal(mine.state.slab.position, theirs.state.slab.position)


def test_votes_that_were_counted_are_those_that_shares_add_up_to(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    counted, received = [], ObservedAttention.received

    def spy(read, slots, window):
        got = received(read, slots, window)
        wanted = read.attention(slots)[:, :, :, -window:].sum(dim=(2, 3))
        sizes = (float(t.norm(dim=-1).max()) for t in (read.read_queries, read.whole.keys))
        bound = softmax_off(16, math.prod(sizes) * read.form.scale) + off(len(read.whole))
        within(got, wanted, bound * read.read_queries.shape[2] * window)
        counted.append(read.watched is not None)
        return got

    monkeypatch.setattr(ObservedAttention, "received", spy)
    feed("llama", f"recent(8) | snap(20, window={WINDOW})", chunk=32, head_dim=16)
    assert counted == [True] * 4
