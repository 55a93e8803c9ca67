"""The kernel over exact slots equals two-weight attention. Bound: as in `test_decode_quantized`."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from roundings import close_runs
from torch import Tensor

from weir import kernels
from weir.cache import StreamingCache
from weir.slab.attention import AttentionParams, two_weight_attention

kernel = pytest.importorskip(
    "weir.kernels.cpu.decode",
    reason="not installed: pip install '.[fast]'",
    exc_type=ImportError,
)
EPS = 2.0**-24


def is_the_formula(seed, batch, kv_heads, group, span, dims, masked, dtype):
    """Whether the kernel answers as two-weight attention over slots `span`, and reads no others."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    first, stop = span
    queries = normal(batch, kv_heads, group, 1, dims[0]) * 3
    keys, values = (normal(batch, kv_heads, stop + 5, dim) for dim in dims)
    for unread in (slice(0, first), slice(stop, None)):
        keys[:, :, unread] = values[:, :, unread] = math.nan
    mask = torch.zeros(batch, kv_heads, stop)
    if masked:
        mask = torch.randn(mask.shape, generator=draw) * 4
        mask[torch.rand(mask.shape, generator=draw) < 0.3] = -math.inf
    form = AttentionParams(dims[0] ** -0.5)
    found = kernel.decode_exact(queries, keys, values, mask if masked else None, form.scale, span)
    read = [t[:, :, first:stop].float() for t in (keys, values)]
    weights = mask[:, :, first:]
    wanted = two_weight_attention(queries.float(), *read, weights, weights, form)
    size = queries.float().norm(dim=-1, keepdim=True) * read[0].norm(dim=-1).amax() * form.scale
    logits_off = (dims[0] + 8) * EPS * (size + 30) + 2.0**-22
    off = 2 * (2 * logits_off + (stop - first + 8) * EPS)
    bound = off * read[1].abs().amax() + torch.finfo(dtype).eps / 2 * wanted.abs()
    assert found.dtype == dtype
    return ((found.float() - wanted).abs() <= bound + torch.finfo(dtype).tiny).all()


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 9]),
    count=st.integers(1, 70),
    first=st.integers(0, 9),
    dims=st.sampled_from([(8, 8), (64, 64), (40, 24), (24, 40), (1, 3)]),
    masked=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_it_is_the_formula(seed, batch, kv_heads, group, count, first, dims, masked, dtype):
    assert is_the_formula(seed, batch, kv_heads, group, (first, first + count), dims, masked, dtype)


@pytest.mark.parametrize("widest", [8, 16])
@pytest.mark.parametrize("dims", [(33, 41), (72, 64), (64, 72), (70, 129)])
def test_heads_that_are_no_whole_number_of_vectors_and_groups_of_any_size(
    dims, widest, monkeypatch
):
    monkeypatch.setattr(kernel, "lanes", lambda: widest)
    for dtype in (torch.float32, torch.bfloat16):
        for group in range(1, 6):
            for count in (3, 10):
                assert is_the_formula(group, 1, 2, group, (1, 1 + count), dims, True, dtype)


def test_a_query_that_sees_nothing_is_answered_by_zero():
    slots = torch.randn(1, 1, 6, 8)
    mask = torch.full((1, 1, 6), -math.inf)
    query = torch.randn(1, 1, 2, 1, 8)
    found = kernel.decode_exact(query, slots, slots, mask, 1.0, (0, 6))
    assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_stays_none(number):
    keys = torch.randn(1, 1, 6, 8)
    keys[0, 0, 3, 2] = number
    query = torch.ones(1, 1, 2, 1, 8)
    found = kernel.decode_exact(query, keys, torch.randn(1, 1, 6, 8), None, 1.0, (0, 6))
    assert found.isnan().all()


def test_however_many_threads_there_are_the_answer_is_the_same(monkeypatch):
    monkeypatch.setattr(kernel, "_WORTH_A_THREAD", 1)
    queries, keys, values = (torch.randn(1, 5, *size) for size in ((3, 1, 64), (40, 64), (40, 64)))
    mask, found = torch.randn(1, 5, 40), []
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(kernel.decode_exact(queries, keys, values, mask, 0.2, (3, 38)))
    assert all(torch.equal(more, found[0]) for more in found)


def test_it_is_taken_for_what_it_knows(monkeypatch):
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    cpu, wide, half = torch.device("cpu"), torch.float32, torch.float16
    assert kernels.decode_exact(cpu, wide) is not None
    assert kernels.decode_exact(cpu, half) is None
    assert kernels.decode_exact(torch.device("meta"), wide) is None
    monkeypatch.setenv(kernels.VARIABLE, "reference")
    assert kernels.decode_exact(cpu, wide) is None


@pytest.mark.parametrize("policy", ["streaming_llm(budget=24)", "sink(2) | recent(6) | uniform(8)"])
@pytest.mark.parametrize("padded", [0, 3])
def test_steps_read_through_it_as_they_do_without_it(llama, ids, monkeypatch, policy, padded):
    """Tested with folded slots, log-weights, and rows that end in different slots."""
    taken, own = [], kernels.decode_exact

    def watched(*given: object) -> object:
        kernel = own(*given)
        taken.append(kernel is not None)
        return kernel

    monkeypatch.setattr(kernels, "decode_exact", watched)
    text, mask, found = ids(2, 50), torch.ones(2, 50, dtype=torch.int64), {}
    mask[1, :padded] = 0
    for wanted in ("reference", "numba"):
        monkeypatch.setenv(kernels.VARIABLE, wanted)
        cache = StreamingCache(llama, policy, chunk=4, batch=2)
        with torch.no_grad():
            llama(text[:, :30], attention_mask=mask[:, :30], past_key_values=cache)
            steps = [
                llama(text[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache)
                for i in range(30, 50)
            ]
        found[wanted] = torch.stack([step.logits for step in steps])
    assert set(taken) == {False, True}
    assert taken[-1]
    close_runs(found["numba"], found["reference"], llama)
