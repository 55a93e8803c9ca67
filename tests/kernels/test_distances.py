"""The kernel of distances equals `torch.cdist`, and gives exactly zero for equal keys."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from roundings import off

from weir import kernels

pytest.importorskip("numba", reason="not installed: pip install '.[fast]'")


@pytest.mark.parametrize(("dim", "threads"), [(1, 1), (13, 1), (64, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_distances_are_those_of_pytorch(dim, threads, dtype, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(import_module("weir.kernels.cpu.distances"), "_WORTH_A_THREAD", 1)
    generator = torch.Generator().manual_seed(dim)
    keys, others = (torch.randn(2, 3, n, dim, generator=generator).to(dtype) for n in (9, 5))
    others[:, :, 2] = keys[:, :, 4]
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    measure = kernels.distances(keys.device)
    assert measure is not None
    got = measure(keys, others)
    exact = "donot_use_mm_for_euclid_dist"
    wanted = torch.cdist(keys.double(), others.double(), compute_mode=exact)
    assert got.dtype == torch.float64
    # Roundings are those of differences of float32 numbers, of their squares, of sums of positive
    # terms, and of a root, all in float64.
    assert ((got - wanted).abs() <= off(dim + 4, torch.float64) * wanted).all()
    assert got[:, :, 4, 2].eq(0).all() and torch.equal(got == 0, wanted == 0)


def test_no_keys_and_no_clusters_are_no_distances(monkeypatch):
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    measure = kernels.distances(torch.device("cpu"))
    assert measure(torch.ones(1, 2, 0, 4), torch.ones(1, 2, 3, 4)).shape == (1, 2, 0, 3)
    assert measure(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 0, 4)).shape == (1, 2, 3, 0)
