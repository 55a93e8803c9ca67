"""Stores weights in huge pages, which are also called large pages here.

A decode step reads all weights, by default from pages of 4 KB on Linux. With pages of 2 MB, the
processor has to look up fewer addresses of pages, so it can read the weights faster.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from weir.models import free_memory
from weir.slab import LARGE_PAGE

LINE = 64
"""Bytes of a processor's cache line; every weight is aligned to it."""
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Linux's setting for large pages."""
ALONE = 2**24
"""Weights of at least this many bytes get a separate memory mapping."""
SPARE = 1.25
"""Weights are moved only if this many times their bytes are free."""

CHUNK = 2**26
"""Smallest number of bytes that `LargePages` requests from the system at a time."""

_MOVED = WeakTensorKeyDictionary()
"""The address that each moved tensor got. A tensor at another address has been given other memory
since.
"""


@torch.inference_mode(False)  # tensors made in inference mode can never be trained
@torch.no_grad()
def move_to_huge_pages(weights: Iterable[Tensor]) -> int:
    """Move contiguous CPU tensors into memory with large pages, and return the bytes moved now.

    Each tensor stays the same object. Its old memory is freed unless a view or a `detach()` holds
    it; such a view no longer follows the tensor. Tensors that were made in inference mode, or are
    already in such memory, are skipped. Does nothing if the others are smaller than one large page
    together, if the system has no large pages, or if too little memory is free.
    """
    free = free_memory(torch.device("cpu"))
    weights = [weight for weight in weights if not weight.is_inference()]
    weights = [weight for weight in weights if weight.numel()]
    moving = [weight for weight in weights if _MOVED.get(weight) != weight.data_ptr()]
    needed = sum(_round_up(weight.nbytes, LINE) for weight in moving)
    if needed < LARGE_PAGE or not _has_large_pages() or free is None or free < SPARE * needed:
        return 0
    # A mapping is freed with its last tensor, so large weights get separate mappings.
    together = [weight for weight in moving if weight.nbytes < ALONE]
    groups = [together, *([weight] for weight in moving if weight.nbytes >= ALONE)]
    return sum(_move(group) for group in groups if group)


class LargePages:
    """Memory in large pages for tensors that are written later.

    Weights that are written there do not have to be moved by `move_to_huge_pages`, which holds them
    twice during the move. If the system has no large pages or too little free memory, tensors get
    ordinary memory.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._place = self._end = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make a tensor with undefined numbers."""
        count = math.prod(shape)
        needed = _round_up(count * dtype.itemsize, LINE)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        if self._memory is None or self._place + needed > self._end:
            self._take(max(needed, CHUNK))
        if self._memory is None:
            return torch.empty(tuple(shape), dtype=dtype)
        made = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._place)
        made = made.view(tuple(shape))
        self._place += needed
        _MOVED[made] = made.data_ptr()
        return made

    def _take(self, nbytes: int) -> None:
        """Map `nbytes` bytes of memory in large pages, if the system has so much. The rest of the
        previous mapping stays unused.
        """
        self._memory = None
        free = free_memory(torch.device("cpu"))
        if not _has_large_pages() or free is None or free < SPARE * nbytes:
            return
        if (mapped := _map(nbytes)) is not None:
            self._memory, self._place = mapped
            self._end = self._place + nbytes


def _map(nbytes: int) -> tuple[mmap.mmap, int] | None:
    """Map memory in large pages.

    Returns the mapping, and where in it the first large page begins; None if the system refuses it.
    """
    try:
        memory = mmap.mmap(-1, nbytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError):  # too little memory, or a kernel without large pages
        return None
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    return memory, _round_up(start, LARGE_PAGE) - start


def _move(weights: Sequence[Tensor]) -> int:
    """Move tensors into one mapping, and return their bytes, or 0 if the system refuses it."""
    needed = sum(_round_up(weight.nbytes, LINE) for weight in weights)
    if (mapped := _map(needed)) is None:
        return 0
    memory, place = mapped
    for weight in weights:
        # Use one `frombuffer` for each weight, because slices of one tensor would be saved as one
        # storage.
        moved = torch.frombuffer(memory, dtype=weight.dtype, count=weight.numel(), offset=place)
        weight.data = moved.view(weight.shape).copy_(weight)
        _MOVED[weight] = weight.data_ptr()
        place += _round_up(weight.nbytes, LINE)
    return needed


def _round_up(count: int, of: int) -> int:
    """Round `count` up to a multiple of `of`."""
    return -(-count // of) * of


def _has_large_pages() -> bool:
    try:
        return "[never]" not in MODE.read_text("ascii")
    except (OSError, ValueError):
        return False
