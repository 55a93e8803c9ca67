"""The kernel of random numbers makes those of the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from weir import kernels
from weir.pools.counter_rng import CounterRNG

pytest.importorskip("numba", reason="not installed: pip install '.[fast]'")

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", [0, 3, 2**70 + 1, (5, 2**63, 5), (7, 7, 7)])
def test_its_numbers_are_those_of_the_reference(seed, monkeypatch):
    draws = CounterRNG(seed, layer=29, pool=2, first=3)
    position = torch.randint(0, 2**40, (3, 9, 4), generator=torch.Generator().manual_seed(0)).mT
    position[0, 0, 0] = -1  # an empty slot, whose random number is never used
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    assert kernels.paths(CPU)["draw_uniform"] == "numba"
    got = draws.uniforms(1, position, 7), draws.uniform(64, position)
    monkeypatch.setenv(kernels.VARIABLE, "reference")
    wanted = draws.uniforms(1, position, 7), draws.uniform(64, position)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == torch.float64 and torch.equal(one, other)
    assert torch.equal(draws.uniform(1, position, 6), got[0][..., 6])


def test_no_tokens_draw_nothing():
    none = torch.zeros(2, 3, 0, dtype=torch.int64)
    assert CounterRNG(1).uniforms(0, none, 5).shape == (2, 3, 0, 5)
    assert CounterRNG(1).uniform(0, none).shape == (2, 3, 0)
