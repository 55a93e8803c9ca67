"""Slots lie in large pages of memory where there are any, and are what they are elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from weir.models.pages import MODE
from weir.slab import Heads, Slab, SlabSpec
from weir.slab.room import LARGE, zeros


def asked(t: Tensor) -> bool:
    """Whether large pages were asked for, for the middle of a tensor's memory."""
    place, inside = t.data_ptr() + t.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text("ascii").splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, stop = (int(bound, 16) for bound in bounds.groups())
            inside = start <= place < stop
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"no memory at {place:x}")


@pytest.mark.skipif(not MODE.exists(), reason="only Linux has large pages for those who ask")
def test_large_pages_are_asked_for_where_a_whole_one_fits() -> None:
    # More than the C library ever takes from memory that it has had before.
    made = zeros((40 * LARGE,), torch.int8)
    assert asked(made)
    assert not asked(torch.zeros(40 * LARGE, dtype=torch.int8))


@pytest.mark.skipif(not MODE.exists(), reason="only Linux has large pages for those who ask")
def test_keys_and_values_of_a_slab_lie_in_them() -> None:
    slab = Slab(SlabSpec(Heads(1, 1, 64, 64, torch.float32), 2**16), 1)
    assert asked(slab.keys)
    assert asked(slab.values)


@pytest.mark.parametrize("size", [0, 5, 2 * LARGE - 1, 2 * LARGE])
def test_they_are_zeros(size: int) -> None:
    made = zeros((1, size), torch.int8)
    assert torch.equal(made, torch.zeros(1, size, dtype=torch.int8))
    assert made.untyped_storage().nbytes() == size


def test_a_system_without_them_has_zeros_too(monkeypatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    assert not zeros((2 * LARGE,), torch.int8).any()


def test_elsewhere_nothing_is_asked() -> None:
    assert zeros((2 * LARGE,), device=torch.device("meta")).is_meta
