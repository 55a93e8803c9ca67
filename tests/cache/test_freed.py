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
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(2**24, dtype=torch.uint8).add_(1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_a_tensor_takes_the_pages_of_the_one_before_it():
    ran = subprocess.run(  # in a process where nothing was freed yet
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    _, again = map(int, ran.stdout.split())
    assert again < 100, "of 4,096 pages of 4 KB"
