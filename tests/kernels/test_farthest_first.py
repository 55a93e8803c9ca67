"""Greedy k-center's kernel picks what the reference picks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import weir
from weir import kernels
from weir.kernels import dispatch
from weir.pools.kcenter import farthest_first

pytest.importorskip("numba", reason="not installed: pip install '.[fast]'")

from weir.kernels.cpu import farthest_first as centers


@st.composite
def keys_of_whole_numbers(draw) -> tuple[Tensor, Tensor, int]:
    """Keys whose distances are exact in any order of summation, and often equal; some are empty."""
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 150)))
    dim, most = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    keys = torch.randint(-most, most + 1, (*shape, dim), generator=generator).float()
    among = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return keys, among, draw(st.integers(1, shape[2]))


@pytest.mark.parametrize("at_once", [0, centers._AT_ONCE])
@given(case=keys_of_whole_numbers())
def test_it_picks_what_the_reference_picks_the_oldest_of_equal_ones(at_once, case):
    keys, among, k = case
    # Powers of two, which leave distances exact.
    weight = 2.0 ** (torch.arange(keys.shape[2]) % 5 - 2).expand(among.shape)
    before = keys.clone(), weight.clone()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(centers, "_AT_ONCE", at_once)
        for its in (None, weight):
            got = centers.farthest_first(keys, among, k, its)
            assert torch.equal(got, farthest_first(keys, among, k, its))
    assert torch.equal(keys, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.parametrize("dim", [1, 32, 64, 80, 129, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [40, 200])
def test_it_picks_what_the_reference_picks_of_any_keys(dim, dtype, k):
    # With such keys, distances may differ by roundings. This would only change what is picked if
    # two distances were almost equal, which is unlikely.
    keys = torch.randn(1, 3, 300, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    among = torch.ones(1, 3, 300, dtype=torch.bool)
    got = centers.farthest_first(keys, among, k)
    assert torch.equal(got, farthest_first(keys, among, k))


@pytest.mark.parametrize("lanes", [8, 16])
def test_a_vector_may_have_8_numbers_or_16(lanes, monkeypatch):
    monkeypatch.setattr(centers, "lanes", lambda: lanes)
    keys = torch.randn(1, 2, 77, 21, generator=torch.Generator().manual_seed(3))
    among = torch.arange(77).expand(1, 2, 77) % 5 > 0
    got = centers.farthest_first(keys, among, 40)
    assert torch.equal(got, farthest_first(keys, among, 40))


def test_so_many_distances_as_cannot_be_held_are_made_pick_by_pick(monkeypatch):
    keys = torch.randn(1, 2, 60, 8, generator=torch.Generator().manual_seed(4))
    among = torch.ones(1, 2, 60, dtype=torch.bool)
    called, pick = [], centers._compiled_pick_of_pairs
    with monkeypatch.context() as patched:
        patched.setattr(centers, "_compiled_pick_of_pairs", lambda *a: called.append(1) or pick(*a))
        for most in (60 * 60, 60 * 60 - 1):
            patched.setattr(centers, "_AT_ONCE", most)
            got = centers.farthest_first(keys, among, 50)
            assert torch.equal(got, farthest_first(keys, among, 50))
    assert len(called) == 1


def test_threads_share_the_heads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(centers, "_WORTH_A_THREAD", 1)
    keys = torch.randn(2, 2, 40, 8, generator=torch.Generator().manual_seed(1))
    among = torch.ones(2, 2, 40, dtype=torch.bool)
    got = centers.farthest_first(keys, among, 30)
    assert torch.equal(got, farthest_first(keys, among, 30))


def test_the_pool_goes_the_way_that_is_asked_for(llama, ids, monkeypatch):
    called = []
    pick = centers.farthest_first
    kernel = dispatch._kernel
    kernel.cache_clear()
    monkeypatch.setattr(centers, "farthest_first", lambda *a: called.append(1) or pick(*a))
    for way in ("numba", "reference"):
        monkeypatch.setenv(kernels.VARIABLE, way)
        called.clear()
        weir.Stream(llama, "recent(8) | kcenter(8)", chunk=4).feed(ids(1, 40))
        assert bool(called) == (way == "numba")
    kernel.cache_clear()
