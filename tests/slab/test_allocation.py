"""Slots are allocated in large pages of memory where the system has them."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from weir.native.huge_pages import MODE
from weir.slab import Heads, Slab, SlabSpec
from weir.slab.slab import LARGE_PAGE, allocate


def asked(t: Tensor) -> bool:
    """Whether large pages were requested for the middle of a tensor's memory."""
    place, inside = t.data_ptr() + t.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text("ascii").splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, stop = (int(bound, 16) for bound in bounds.groups())
            inside = start <= place < stop
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"no memory at {place:x}")


@pytest.mark.skipif(not MODE.exists(), reason="only Linux has large pages for those who ask")
def test_large_pages_are_asked_for_where_one_fits() -> None:
    assert asked(allocate((40 * LARGE_PAGE,), torch.int8))
    # This must be a new mapping: the C library can reuse memory that was requested in large pages.
    assert not asked(torch.frombuffer(mmap.mmap(-1, 40 * LARGE_PAGE), dtype=torch.int8))


@pytest.mark.skipif(not MODE.exists(), reason="only Linux has large pages for those who ask")
def test_keys_and_values_of_a_slab_lie_in_them() -> None:
    slab = Slab(SlabSpec(Heads(1, 1, 64, 64, torch.float32), 2**16), 1)
    assert asked(slab.keys)
    assert asked(slab.values)
    assert not slab.keys.any()
    assert slab.b.isneginf().all()


@pytest.mark.parametrize("size", [0, 5, LARGE_PAGE // 2 - 1, LARGE_PAGE // 2, LARGE_PAGE + 4097])
def test_it_is_memory_for_what_is_wanted(size: int) -> None:
    made = allocate((1, size), torch.int8).fill_(3)
    assert made.shape == (1, size)
    assert made.untyped_storage().nbytes() == size
    assert torch.equal(made, torch.full((1, size), 3, dtype=torch.int8))


def test_a_system_without_them_has_memory_too(monkeypatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    assert not allocate((2 * LARGE_PAGE,), torch.int8).zero_().any()


def test_elsewhere_nothing_is_asked(monkeypatch) -> None:
    monkeypatch.setattr("weir.slab.slab._advise_large_pages", lambda t: pytest.fail("asked"))
    assert allocate((2 * LARGE_PAGE,), torch.int8, torch.device("meta")).is_meta
    with FakeTensorMode():  # fake tensors report the CPU as their device
        assert allocate((2 * LARGE_PAGE,), torch.int8).shape == (2 * LARGE_PAGE,)
