"""Memory that was freed is not handed out page by page again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from weir.cache.freed import keep_what_is_freed

keep_what_is_freed()
for _ in range(9):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24, dtype=torch.uint8).add_(1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_tensors_take_the_pages_of_those_before_them():
    ran = subprocess.run(  # in a process where nothing was freed yet
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    faults = sorted(map(int, ran.stdout.split()))
    # One or two find a hole that something small was put into.
    assert faults[len(faults) // 2] < 100, "of 4,096 pages of 4 KB"
