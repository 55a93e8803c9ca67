"""The CPU's kernel over quantised slots equals two-weight attention over what they are read as.

Bound: as for `test_triton_decode`; both sum in float32. The kernel's exponential is a polynomial
that is off by less than 2^-22 of itself, and steps are multiplied in at another place, one rounding
more for each logit and each weight.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weir.slab.attention import Form, two_weight_attention
from weir.slab.quantised import INT8, dequantise, quantise, steps

pytest.importorskip("numba", reason="not installed: pip install 'weir[fast]'")

from weir.kernels.numba_decode import decode8

EPS = 2.0**-24


@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8]),
    coded=st.integers(1, 70),
    exact=st.integers(0, 40),
    dims=st.sampled_from([(8, 8), (64, 64), (40, 24)]),
    masked=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_it_is_the_formula(seed, batch, kv_heads, group, coded, exact, dims, masked, dtype):
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    key_dim, value_dim = dims
    queries = normal(batch, kv_heads, group, 1, key_dim) * 3
    held = [normal(batch, kv_heads, coded, dim) for dim in dims]
    keys, values = (normal(batch, kv_heads, exact + 5, dim) for dim in dims)
    codes = [quantise(t, INT8) for t in held]
    given_ = [t for numbers, peaks in codes for t in (numbers, steps(peaks[..., 0], INT8))]
    mask = torch.zeros(batch, kv_heads, coded + exact)
    if masked:
        mask = torch.randn(mask.shape, generator=draw) * 4
        mask[torch.rand(mask.shape, generator=draw) < 0.3] = -math.inf
    form = Form(key_dim**-0.5)
    slots = (0, coded + exact)
    found = decode8(
        queries, tuple(given_), keys, values, mask if masked else None, form.scale, slots
    )
    read = [dequantise(*code, INT8, torch.float32) for code in codes]
    whole = [
        torch.cat([t, more[:, :, :exact].float()], dim=2)
        for t, more in zip(read, (keys, values), strict=True)
    ]
    wanted = two_weight_attention(queries.float(), *whole, mask, mask, form)
    size = queries.float().norm(dim=-1, keepdim=True) * whole[0].norm(dim=-1).amax() * form.scale
    logits_off = (key_dim + 8) * EPS * (size + 30) + 2.0**-22
    off = 2 * (2 * logits_off + (coded + exact + 8) * EPS)
    bound = off * whole[1].abs().amax() + torch.finfo(dtype).eps / 2 * wanted.abs()
    bound = bound + torch.finfo(dtype).tiny
    assert found.dtype == dtype
    assert ((found.float() - wanted).abs() <= bound).all()


def test_a_query_that_sees_nothing_is_answered_by_zero():
    numbers, peaks = quantise(torch.randn(1, 1, 4, 8), INT8)
    step = steps(peaks[..., 0], INT8)
    exact = torch.randn(1, 1, 3, 8)
    mask = torch.full((1, 1, 7), -math.inf)
    query = torch.randn(1, 1, 2, 1, 8)
    found = decode8(query, (numbers, step, numbers, step), exact, exact, mask, 1.0, (0, 7))
    assert torch.equal(found, torch.zeros_like(found))
