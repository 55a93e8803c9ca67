"""Ties are decided by age, even if rounding has made equal numbers differ.

A stream that repeats itself has tokens that are equally good. Their scores then differ only by
rounding, and rounding differs between native steps, kernels and batches.
"""

from __future__ import annotations

import pytest
import torch
from reference.models import make

import weir
from weir import kernels
from weir.pools import select_highest
from weir.pools.hive import _maxima
from weir.pools.kcenter import farthest_first

NOISE = 1 + 4 * torch.finfo(torch.float32).eps
"""A factor by which rounding can make equal scores differ."""
APART = 1 + 4 * kernels.ALIKE
"""A factor so large that scores that differ by it do not differ by rounding only."""


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_of_scores_equal_but_for_rounding_the_oldest_stay(sign: float) -> None:
    score = sign * torch.tensor([[[3.0, 3.0 * NOISE, 3.0 / NOISE, 3.0, 3.0 * NOISE]]])
    among = torch.ones_like(score, dtype=torch.bool)
    for n in range(1, 5):
        assert select_highest(n, among, score)[0, 0].tolist() == [i < n for i in range(5)]
    # With `alike=0`, as for pools with `tie_margin = 0`, all different scores are told apart.
    highest = sorted(range(5), key=lambda i: -score[0, 0, i].item())
    exact = select_highest(1, among, score, alike=0.0)[0, 0]
    assert exact.nonzero().flatten().tolist() == [highest[0]]


def test_the_next_score_decides_where_the_first_differs_by_rounding() -> None:
    first = torch.tensor([[[1.0 * NOISE, 1.0, 1.0 / NOISE]]])
    second = torch.tensor([[[2.0, 5.0, 5.0 * NOISE]]])
    among = torch.ones_like(first, dtype=torch.bool)
    assert select_highest(1, among, first, second)[0, 0].tolist() == [False, True, False]
    assert select_highest(2, among, first, second)[0, 0].tolist() == [False, True, True]


def test_scores_that_differ_by_more_than_rounding_are_told_apart() -> None:
    score = torch.tensor([[[1.0, APART, 1.0]]])
    among = torch.ones_like(score, dtype=torch.bool)
    assert select_highest(1, among, score)[0, 0].tolist() == [False, True, False]
    infinite = torch.tensor([[[torch.inf, 1e30, torch.inf, -torch.inf]]])
    among = torch.ones_like(infinite, dtype=torch.bool)
    assert select_highest(2, among, infinite)[0, 0].tolist() == [True, False, True, False]
    assert select_highest(4, among, infinite)[0, 0].tolist() == [True, True, True, False]


def test_of_a_segment_equal_but_for_rounding_the_first_stays() -> None:
    mass = torch.tensor([[[0.25, 0.25 * NOISE, 0.1, 0.0, 0.0, 0.0]]])
    among = torch.ones_like(mass, dtype=torch.bool)
    assert _maxima(3, among, mass)[0, 0].nonzero().flatten().tolist() == [0, 3]


@pytest.mark.parametrize("k", [2, 40])
@pytest.mark.parametrize("kernel", [False, True])
def test_of_keys_equally_far_but_for_rounding_the_oldest_is_picked(kernel: bool, k: int) -> None:
    """The kernel has one loop for a few picks among many keys, and another for many picks."""
    pick = farthest_first
    if kernel:
        pytest.importorskip("numba", reason="not installed: pip install 'weir-kv[fast]'")
        from weir.kernels.cpu.farthest_first import farthest_first as pick
    keys = torch.zeros(1, 1, 60, 16)
    keys[..., 20, 3] = 1.0
    keys[..., 40, 5] = NOISE  # farther from the first key, but only by rounding
    keys[..., 50, 7] = 0.5
    order = pick(keys, torch.ones(1, 1, 60, dtype=torch.bool), k)[0, 0]
    assert order[0] == 0
    assert order[20] == 1
    if k > 3:
        assert (order[40], order[50]) == (2, 3)


@pytest.mark.parametrize(
    "policy",
    [
        "sink(2) | recent(8) | defend(12, window=4, wide=2)",
        "sink(2) | recent(8) | knorm(12)",
        "sink(2) | recent(8) | curdkv(12)",
        "sink(2) | recent(8) | kcenter(12)",
    ],
)
def test_native_steps_keep_the_same_of_a_stream_that_repeats_itself(
    policy: str, kernel_compiled: None
) -> None:
    pytest.importorskip("numba", reason="not installed: pip install 'weir-kv[fast]'")
    model = make("llama", head_dim=64, intermediate_size=112)
    held = []
    for native in (False, True):
        weir.compile_steps(model, on=native)
        try:
            stream = weir.Stream(model, policy, chunk=8)
            for token in [7] * 100:
                stream.feed([token])
        finally:
            weir.compile_steps(model, on=False)
        held.append([stream.slots(layer).position for layer in range(len(stream.cache))])
    for own, step in zip(*held, strict=True):
        assert torch.equal(own, step)
