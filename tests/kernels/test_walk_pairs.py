"""The kernel that walks through pairs chooses the sign that the formula gives, unless the decision
is so close that rounding can change it.

The kernel's products are off by the rounding of a logit and of sums. The error of a walk's running
sum is the sum of these errors, and the error of the probability of a sign is the gain times that.
If a random number is within this error of the probability, both signs are accepted.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weir import kernels
from weir.pools.balance.halving import Halving, Sets

halves = pytest.importorskip(
    "weir.kernels.cpu.walk",
    reason="not installed: pip install '.[fast]'",
    exc_type=ImportError,
)
EPS = 2.0**-24
CONSTANT, GAMMA, STEEPEST = 0.025, 4.0, 60.0


def differences(keys, values, a, b, rate):
    """Compute the inner products of the differences of pairs, and the sums of the absolute values
    of their terms, both float64 [blocks, pairs, pairs]; and the largest exponent [blocks].
    """
    keys, values, a, b = (t.double() for t in (keys, values, a, b))
    keys = keys - keys.mean(dim=1, keepdim=True)
    top = rate * keys.square().sum(dim=2).amax(dim=1)
    above, below = (t - t.amax(dim=1, keepdim=True) for t in (a, b))
    heavy = values * above.exp()[..., None]
    counts = CONSTANT * (below[:, :, None] + below[:, None]).exp()
    y = (rate * keys @ keys.mT - top[:, None, None]).exp()
    lengths = heavy.abs()
    found, size = (y * (sums + counts) for sums in (heavy @ heavy.mT, lengths @ lengths.mT))
    change = found[:, 0::2] - found[:, 1::2]
    return (
        change[..., 0::2] - change[..., 1::2],
        size.unflatten(1, (-1, 2)).sum(dim=2).unflatten(2, (-1, 2)).sum(dim=3),
        top,
    )


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(1, 3),
    pairs=st.integers(1, 30),
    dims=st.sampled_from([(64, 64), (40, 24), (3, 17)]),
    weighed=st.booleans(),
    small=st.sampled_from([1.0, 0.01]),  # with 0.01, the denominator outweighs the values
    lanes=st.sampled_from([8, 16]),
)
def test_each_sign_is_against_the_sum_so_far(seed, blocks, pairs, dims, weighed, small, lanes):
    draw = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(blocks, 2 * pairs, dim, generator=draw) for dim in dims)
    values = small * values
    a = torch.randn(blocks, 2 * pairs, generator=draw) * weighed
    u = torch.rand(blocks, pairs, generator=draw, dtype=torch.float64)
    free = torch.rand(blocks, pairs, generator=draw) < 0.8
    rate = 0.3 * dims[0] ** -0.5
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(halves, "lanes", lambda: lanes)
        signs = halves.walk_pairs(keys, values, a, a / 2, u, free, rate, CONSTANT, GAMMA, STEEPEST)
    assert torch.equal(signs != 0, free)
    products, size, top = differences(keys, values, a, a / 2, rate)
    gain = GAMMA * top.clamp_max(STEEPEST).exp()
    logit_off = (dims[0] + 8) * EPS * (2 * top + 1) + 2.0**-22
    before = torch.ones(pairs, pairs).triu(1).double() * signs[..., None]
    chance = 0.5 - gain[:, None] * (before * products).sum(dim=1)
    off = 2 * (logit_off + (dims[1] + pairs + 8) * EPS) * gain
    off = off[:, None] * (before.abs() * size).sum(dim=1) + EPS
    clear = free & ((u - chance).abs() > off)
    assert torch.equal((signs > 0)[clear], (u < chance)[clear])


def test_a_denominator_alone_weighs_nothing_in_the_numerator():
    draw = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 8, 16, generator=draw)
    a, b = torch.full((2, 8), -math.inf), torch.zeros(2, 8)
    u, free = torch.rand(2, 4, generator=draw).double(), torch.ones(2, 4, dtype=torch.bool)
    how = 0.1, CONSTANT, GAMMA, STEEPEST
    found = halves.walk_pairs(keys, values, a, b, u, free, *how)
    assert torch.equal(found, halves.walk_pairs(keys, 0 * values, b, b, u, free, *how))


def test_halving_asks_it_for_whole_pairs_in_float32(monkeypatch):
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    draw = torch.Generator().manual_seed(1)
    keys, values = torch.randn(2, 3, 1, 12, 16, generator=draw)
    weights, u = torch.zeros(3, 1, 12), torch.rand(3, 1, 12, generator=draw)
    asked, kernel = [], halves.walk_pairs
    kernels.dispatch._kernel.cache_clear()
    monkeypatch.setattr(halves, "walk_pairs", lambda *t: asked.append(t) or kernel(*t))
    for dtype in (torch.float32, torch.bfloat16):
        Halving().halve(Sets(keys.to(dtype), values.to(dtype), weights, weights, u), 0.25)
    Halving(gamma=None).halve(Sets(keys, values, weights, weights, u), 0.25)
    kernels.dispatch._kernel.cache_clear()
    assert len(asked) == 1
