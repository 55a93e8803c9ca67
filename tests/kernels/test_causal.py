"""The kernel for pieces of a prompt equals two-weight attention. Bound: see `test_decode_exact`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import weir
from weir import kernels
from weir.cache.layer.attention import band
from weir.errors import WeirError
from weir.slab.attention import (
    AttentionParams,
    attention_weights,
    compute_logits,
    split_weights,
    two_weight_attention,
)
from weir.slab.quantization import INT8, dequantize, quantize
from weir.slab.slots import QuantizedStorage

causal_kernel = pytest.importorskip(
    "weir.kernels.cpu.causal",
    reason="not installed: pip install '.[fast]'",
    exc_type=ImportError,
)
EPS = 2.0**-24


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3]),
    length=st.integers(16, 40),
    before=st.integers(0, 50),
    dims=st.sampled_from([(64, 64), (40, 24), (24, 40), (3, 17)]),
    masked=st.sampled_from(["no", "yes", "apart"]),
    coded=st.integers(0, 50),
    lanes=st.sampled_from([8, 16]),
)
def test_it_is_the_formula(
    seed, batch, kv_heads, group, length, before, dims, masked, coded, lanes
):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    slots = before + length
    # Laid out as in a model: the numbers of a head are contiguous, but its tokens are not.
    queries = normal(batch, length, kv_heads, group, dims[0]).permute(0, 2, 3, 1, 4) * 3
    keys, values = (normal(batch, kv_heads, slots + 5, dim)[:, :, 2:-3] for dim in dims)
    a = torch.zeros(batch, kv_heads, slots)
    if masked != "no":
        a = normal(*a.shape) * 4
        a[torch.rand(a.shape, generator=draw) < 0.3] = -math.inf
    b, given, factors = a, a if masked == "yes" else None, None
    if masked == "apart":
        b = normal(*a.shape)
        b[torch.rand(a.shape, generator=draw) < 0.2] = -math.inf
        b[:, :, before:] = 0.0  # so that every query has a denominator
        given, *factors = split_weights(a, b)
    form = AttentionParams(dims[0] ** -0.5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(causal_kernel, "lanes", lambda: lanes)
        asked = queries, keys, values, given, form.scale, factors
        found = causal_kernel.causal(*asked)
        # Quantized slots give answers that are bit-identical to those of the dequantized numbers.
        coded = min(coded, before)
        front = [(*quantize(t[:, :, :coded], INT8), INT8.levels) for t in (keys, values)]
        read = [dequantize(*it[:2], INT8, torch.float32) for it in front]
        exact = [t[:, :, coded:] for t in (keys, values)]
        whole = [torch.cat(both, dim=2) for both in zip(read, exact, strict=True)]
        same = causal_kernel.causal(queries, *exact, *asked[3:], tuple(front) if coded else None)
        assert torch.equal(same, causal_kernel.causal(queries, *whole, *asked[3:]))
        counted = None
        if masked != "apart":
            count = causal_kernel.causal_and_received
            counted = count(*asked[:5])
            twice = count(queries, *exact, *asked[3:5], tuple(front) if coded else None)
            assert (counted is None) == (length % lanes > 0)
            assert counted is None or torch.equal(twice[1], count(queries, *whole, *asked[3:5])[1])
    bias = band(length, slots, None, torch.float32, torch.device("cpu"))
    wanted = two_weight_attention(queries, keys, values, a, b, form, bias)
    size = queries.norm(dim=-1, keepdim=True) * keys.norm(dim=-1).amax() * form.scale
    logits_off = (dims[0] + 8) * EPS * (size + 30) + 2.0**-22
    off = 2 * (2 * logits_off + (slots + 8) * EPS)
    if counted is not None:
        answers, received = counted
        assert torch.equal(answers, found)
        shares = attention_weights(
            compute_logits(queries, keys, form, bias).double(), b.double(), form
        )
        shares = shares[0].unflatten(3, (-1, lanes)).sum(dim=(2, 4))
        most = off.amax(dim=(2, 3, 4))[..., None, None] + (group * lanes + 8) * EPS
        # Weights below e^-87 of the largest are lost.
        assert ((received - shares).abs() <= most * shares + group * lanes * 2.0**-125).all()
    # With two log-weights, an answer can be larger than any value, so sums of |values| are bounds.
    sums = two_weight_attention(queries, keys, values.abs(), a, b, form, bias)
    assert ((found - wanted).abs() <= off * sums + EPS * wanted.abs()).all()


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_stays_none_for_those_who_see_it(number):
    queries, slots = torch.ones(1, 1, 1, 16, 16), torch.randn(1, 1, 20, 16)
    slots[0, 0, 9, 2] = number
    found = causal_kernel.causal(queries, slots, torch.randn(1, 1, 20, 16), None, 1.0)
    assert found[0, 0, 0, :5].isfinite().all()  # the queries at slots 4 to 8
    assert found[0, 0, 0, 5:].isnan().all()


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("step", [-100.0, 100.0])
def test_each_query_has_a_peak_of_its_own(lanes, step, monkeypatch):
    monkeypatch.setattr(causal_kernel, "lanes", lambda: lanes)
    # A query's logits are equal, but differ from those of the next query by 1,600, which is far
    # more than the exponential of float32 can span.
    queries = (torch.arange(16.0) * step)[:, None].expand(1, 1, 1, 16, 16)
    keys, values = torch.ones(1, 1, 16, 16), torch.eye(16)[None, None]
    found = causal_kernel.causal(queries, keys, values, None, 1.0)
    wanted = torch.ones(16, 16).tril() / torch.arange(1.0, 17.0)[:, None]
    assert ((found - wanted).abs() <= EPS * wanted).all()


@pytest.mark.parametrize(("length", "width"), [(15, 16), (16, 15), (0, 16)])
def test_less_than_it_takes_at_once_is_refused(length, width):
    queries, keys = torch.ones(1, 1, 1, length, 4), torch.ones(1, 1, 20, 4)
    with pytest.raises(WeirError, match="16 queries"):
        causal_kernel.causal(queries, keys, torch.ones(1, 1, 20, width), None, 1.0)


@pytest.mark.parametrize("coded", [0, 3])
def test_more_queries_than_slots_are_refused(coded):
    queries, exact = torch.ones(1, 1, 1, 20, 16), torch.ones(1, 1, 19 - coded, 16)
    front = (torch.ones(1, 1, coded, 16).char(), torch.ones(1, 1, coded, 1).bfloat16(), 127)
    with pytest.raises(WeirError, match="at most 19, got 20"):
        causal_kernel.causal(queries, exact, exact, None, 1.0, None, (front, front))


def test_a_stream_that_asks_it_reads_what_one_without_reads(llama, ids, monkeypatch):
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    asked, kernel = [], causal_kernel.causal
    kernels.dispatch._kernel.cache_clear()
    monkeypatch.setattr(causal_kernel, "causal", lambda *a: asked.append(a[3]) or kernel(*a))
    text = ids(1, 150)
    # Slots are exact, because with 8 bits, a different rounding can move a number by a whole step.
    policy = "sink(2) | recent(40) | kcenter(12, quiet=1)"
    found = weir.Stream(llama, policy, chunk=16).feed(text, all_logits=True)
    kernels.dispatch._kernel.cache_clear()
    pieces = len(asked) // llama.config.num_hidden_layers
    assert pieces == 9  # of 16 tokens each; the last 6 tokens are left over
    assert asked[0] is None and asked[-1] is not None  # weights come with the first fold
    monkeypatch.setenv(kernels.VARIABLE, "reference")
    wanted = weir.Stream(llama, policy, chunk=16).feed(text, all_logits=True)
    assert (found - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_quantized_slots_are_read_as_elsewhere(llama, ids, monkeypatch, form):
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    policy, text = f"sink(2) | recent(20) | recent(20):{form} | kcenter(12):{form}", ids(1, 150)
    found = weir.Stream(llama, policy, chunk=16).feed(text, all_logits=True)
    asked, bytes_of = [], QuantizedStorage.bytes_of
    monkeypatch.setattr(QuantizedStorage, "bytes_of", lambda *a: asked.append(bytes_of(*a)))
    wanted = weir.Stream(llama, policy, chunk=16).feed(text, all_logits=True)
    assert torch.equal(found, wanted)
    assert len(asked) > 1
    assert all((it is None) == (form == "fp8") for it in asked)


def test_however_many_threads_there_are_the_answer_is_the_same(monkeypatch):
    monkeypatch.setattr(causal_kernel, "_WORTH_A_THREAD", 1)
    queries, keys, values = (torch.randn(2, 3, *size) for size in ((2, 64, 32), (90, 32), (90, 24)))
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        both = causal_kernel.causal_and_received(queries, keys, values, None, 0.2)
        odd = causal_kernel.causal(queries[:, :, :, :37], keys, values, None, 0.2)
        found.append([*both, odd])
    for more in found[1:]:
        assert all(map(torch.equal, more, found[0]))


def test_what_it_does_not_know_goes_to_pytorch(monkeypatch):
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    queries, values = torch.zeros(1, 1, 1, 16, 16), torch.zeros(1, 1, 20, 16)
    assert kernels.causal(queries, values) is not None
    assert kernels.causal(queries[:, :, :, 1:], values) is None
    assert kernels.causal(queries, values[..., 1:]) is None
    assert kernels.causal(queries.bfloat16(), values) is None
    assert kernels.causal(queries, values.bfloat16()) is None
