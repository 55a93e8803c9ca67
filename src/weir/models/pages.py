"""Weights in large pages of memory.

A decode step reads all weights in order, and at every page the processor has to look up where the
next one lies. Linux's usual pages are of 4 KB, and files that are mapped into memory, as
transformers loads weights, have no others. In pages of 2 MB a sum over a weight was a quarter
faster on one machine (`docs/speed.md`). Knows nothing about models.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from weir.models.memory import free_memory
from weir.slab import LARGE_PAGE

LINE = 64
"""Bytes of a processor's cache line, at which each weight begins."""
MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""Whether Linux gives large pages to those who ask."""
ALONE = 2**24
"""Bytes from which on a weight has a piece of memory of its own."""
SPARE = 1.25
"""How many times the bytes of the weights have to be free, so that they are moved."""

_MOVED = WeakTensorKeyDictionary()
"""Where each tensor that was moved lay afterwards: it may have been given other memory since."""


@torch.inference_mode(False)  # tensors that were made in it can never be trained
@torch.no_grad()
def into_large_pages(weights: Iterable[Tensor]) -> int:
    """Move tensors into memory of large pages, one after the other.

    Each stays the same object with the same numbers, and can be changed, saved and moved on. What
    it had is given back, unless somebody else holds it: a view or `detach()` of before no longer
    follows. Nothing is done where Linux does not offer such pages or has too little memory.

    Args:
        weights: contiguous tensors on a CPU, whose memory nobody else uses.

    Returns:
        The bytes that were moved; those of tensors moved before do not count.
    """
    free = free_memory(torch.device("cpu"))
    moving = [
        each for each in weights if not each.is_inference() and _MOVED.get(each) != each.data_ptr()
    ]
    needed = sum(_whole(each.nbytes, LINE) for each in moving)
    if needed < LARGE_PAGE or not _offered() or free is None or free < SPARE * needed:
        return 0
    # Memory is given back when the last that lies in it has gone: large weights go by themselves.
    together = [each for each in moving if each.nbytes < ALONE]
    groups = [together, *([each] for each in moving if each.nbytes >= ALONE)]
    return sum(_move(group) for group in groups if group)


def _move(weights: Sequence[Tensor]) -> int:
    """Into one piece of memory; the bytes of all, or 0 where the system gives none."""
    needed = sum(_whole(each.nbytes, LINE) for each in weights)
    try:
        memory = mmap.mmap(-1, needed + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, ValueError):  # no room for so much at once, or a kernel without them
        return 0
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    place = _whole(start, LARGE_PAGE) - start
    for weight in weights:
        # Each from the memory anew: as parts of one tensor they would be saved as one.
        moved = torch.frombuffer(memory, dtype=weight.dtype, count=weight.numel(), offset=place)
        weight.data = moved.view(weight.shape).copy_(weight)
        _MOVED[weight] = weight.data_ptr()
        place += _whole(weight.nbytes, LINE)
    return needed


def _whole(count: int, of: int) -> int:
    """The next multiple."""
    return -(-count // of) * of


def _offered() -> bool:
    try:
        return "[never]" not in MODE.read_text("ascii")
    except (OSError, ValueError):
        return False
