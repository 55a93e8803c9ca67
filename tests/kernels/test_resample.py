"""The kernel for weighted reservoirs returns bit for bit what the PyTorch version returns."""

from __future__ import annotations

import pytest
import torch

from weir import kernels
from weir.pools.subgen import resample, reservoirs

pytest.importorskip("numba", reason="not installed: pip install '.[fast]'")


@pytest.mark.parametrize(("count", "entries"), [(1, 7), (5, 7), (40, 7), (5, 0)])
def test_its_samples_and_sums_are_those_of_the_reference(count, entries, monkeypatch):
    generator = torch.Generator().manual_seed(count)
    total = torch.rand(2, 3, count, generator=generator, dtype=torch.float64) * 10
    before = total.clone()
    weight = torch.exp(8 * torch.randn(2, 3, 64, generator=generator, dtype=torch.float64))
    weight[:, :, ::5] = 0.0  # the weight of places where no token arrives
    into = torch.randint(count, (2, 3, 64), generator=generator)
    u = torch.rand(2, 64, 3, entries, generator=generator, dtype=torch.float64).transpose(1, 2)
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    assert kernels.paths(u.device)["resample"] == "numba"
    for got, wanted in zip(
        resample(total, weight, into, u), reservoirs(total, weight, into, u), strict=True
    ):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    assert torch.equal(total, before)


def test_nobody_arrives_and_nothing_changes():
    total = torch.ones(1, 2, 3, dtype=torch.float64)
    none = torch.zeros(1, 2, 0)
    last, after = resample(total, none.double(), none.long(), torch.zeros(1, 2, 0, 4).double())
    assert last.eq(-1).all() and last.shape == (1, 2, 3, 4) and torch.equal(after, total)
