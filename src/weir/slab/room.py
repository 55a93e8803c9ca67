"""Memory for slots: in large pages, where Linux gives them to those who ask.

Attention of a decode step reads all slots, and at every page the processor has to look up where the
next one lies; usual pages have 4 KB, large ones 2 MB. The kernel over exact slots took 0.8 of the
time with 16 rows (`docs/speed.md`).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE_PAGE = 2**21
"""Bytes of a large page, as x86 and most ARM processors have them."""


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """`torch.empty`, for what is kept for long and read often.

    A large page may hold the end of one tensor and the beginning of the next, if all of them are
    made before anything is written to one.
    """
    made = torch.empty(shape, dtype=dtype, device=device)
    real = type(made) is Tensor and made.device.type == "cpu"  # others have no address
    if real and made.nbytes >= LARGE_PAGE // 2:
        _ask(made)
    return made


def _ask(t: Tensor) -> None:
    """For large pages; whoever has none refuses, and all stays as it is."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return
    usual = mmap.PAGESIZE
    start = -(-t.data_ptr() // usual) * usual
    size = (t.data_ptr() + t.nbytes) // usual * usual - start
    advise = ctypes.CDLL(None).madvise
    advise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_HUGEPAGE))
