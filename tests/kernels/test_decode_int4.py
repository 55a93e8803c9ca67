"""The kernel over slots of 4 bits equals two-weight attention over their dequantized numbers.

Bound: as in `test_decode_quantized`. Besides, the Hadamard rotation makes each number a sum of
`block_size` numbers. It is applied to the query, which is then off by that many roundings of its
length, and to the answer.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_decode_quantized import EPS, coded_slots
from torch import Tensor

from weir import kernels
from weir.slab.attention import AttentionParams, two_weight_attention
from weir.slab.quantization import block_size, hadamard
from weir.slab.selection import AttendedSlots, compute_attention

pytest.importorskip("numba", reason="not installed: pip install '.[fast]'")
KERNEL = "weir.kernels.cpu.decode"


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8]),
    coded=st.integers(1, 70),
    exact=st.integers(0, 40),
    unread=st.integers(0, 69),
    dims=st.sampled_from([(32, 32), (64, 64), (40, 96), (36, 44)]),
    masked=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    lanes=st.sampled_from([8, 16]),
    threads=st.booleans(),
)
@pytest.mark.own_kernels
def test_it_is_the_formula(
    seed, batch, kv_heads, group, coded, exact, unread, dims, masked, dtype, lanes, threads
):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    key_dim, value_dim = dims
    queries = normal(batch, kv_heads, group, 1, key_dim) * 3
    slab = coded_slots("int4", *(normal(batch, kv_heads, coded, dim) for dim in dims), dtype)
    keys, values = (normal(batch, kv_heads, exact + 5, dim) for dim in dims)
    mask = torch.zeros(batch, kv_heads, coded + exact)
    if masked:
        mask = torch.randn(mask.shape, generator=draw) * 4
        mask[torch.rand(mask.shape, generator=draw) < 0.3] = -math.inf
    params = AttentionParams(key_dim**-0.5)
    start, stop = min(unread, coded - 1), coded + exact
    slots = AttendedSlots(keys, values, slab, mask, mask, None, start, stop, plain=not masked)
    assert kernels.decode_int4(queries, value_dim).__module__ == KERNEL
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(f"{KERNEL}.lanes", lambda: lanes)
        if threads:
            patched.setattr(f"{KERNEL}._WORTH_A_THREAD", 1)
            patched.setattr(torch, "get_num_threads", lambda: 2)
        found = compute_attention(queries, slots, params).answers
    slab.dtype = torch.float32
    whole = [
        torch.cat([t, more[:, :, :exact].float()], dim=2)[:, :, start:]
        for t, more in zip(
            (slab.keys(0, coded), slab.values(0, coded)), (keys, values), strict=True
        )
    ]
    mask = mask[:, :, start:]
    wanted = two_weight_attention(queries.float(), *whole, mask, mask, params)
    size = queries.float().norm(dim=-1, keepdim=True) * whole[0].norm(dim=-1).amax() * params.scale
    logits_off = (key_dim + block_size(key_dim) + 8) * EPS * (size + 30) + 2.0**-22
    off = 2 * (2 * logits_off + (coded + exact + block_size(value_dim) ** 1.5 + 8) * EPS)
    bound = off * whole[1].abs().amax() * math.sqrt(block_size(value_dim))
    bound = bound + torch.finfo(dtype).eps / 2 * wanted.abs() + torch.finfo(dtype).tiny
    assert found.dtype == dtype
    assert ((found.float() - wanted).abs() <= bound).all()


def test_a_query_that_sees_nothing_is_answered_by_zero():
    coded = coded_slots("int4", *torch.randn(2, 1, 1, 4, 32))
    exact, mask = torch.randn(1, 1, 3, 32), torch.full((1, 1, 7), -math.inf)
    slots = AttendedSlots(exact, exact, coded, mask, mask, None, 0, 7)
    query, params = torch.randn(1, 1, 2, 1, 32), AttentionParams(1.0)
    assert not compute_attention(query, slots, params).answers.any()


def test_pytorch_alone_and_heads_of_few_numbers_are_the_formula_too():
    draw = torch.Generator().manual_seed(1)
    for dim, by in ((8, "torch"), (8, "kernels"), (64, "torch")):
        coded = coded_slots("int4", *torch.randn(2, 1, 2, 20, dim, generator=draw))
        keys, values = torch.randn(2, 1, 2, 9, dim, generator=draw)
        mask = torch.zeros(1, 2, 29)
        slots = AttendedSlots(keys, values, coded, mask, mask, None, 0, 29)
        query, params = torch.randn(1, 2, 3, 1, dim, generator=draw), AttentionParams(0.2)
        found = compute_attention(query, slots, params, by=by).answers
        whole = torch.cat([coded.keys(0, 20), keys], 2), torch.cat([coded.values(0, 20), values], 2)
        wanted = two_weight_attention(query, *whole, mask, mask, params)
        assert (found - wanted).abs().max() < 2.0**-24 * dim * 29 * wanted.abs().max()
    assert torch.allclose(hadamard(hadamard(query)), query, atol=2.0**-20)
