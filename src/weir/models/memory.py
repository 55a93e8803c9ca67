"""Memory: how much is free, how much a model takes, and its weights in huge pages.

A decode step reads all weights in order, and at every page the processor has to look up where the
next one lies. Linux's usual pages are of 4 KB, and files that are mapped into memory, as
transformers loads weights, have no others. In pages of 2 MB a sum over a weight was a quarter
faster on one machine (`docs/speed.md`). Knows nothing about caches.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from weir.slab import LARGE_PAGE

GROUP = Path("/sys/fs/cgroup")
"""Where a container sees its control group (version 2)."""
_LIMITED = ("max", "current")
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


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device; None where nobody says so."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    of_machine = _of_machine()
    if of_machine is None:
        return None
    with suppress(OSError, ValueError):  # "max", or no control groups
        return max(0, min(of_machine, _of_container()))
    return of_machine


def _of_container() -> int:
    """What a control group has left, pages of files with it, which the system takes back."""
    limit, taken = (int((GROUP / f"memory.{name}").read_text("ascii")) for name in _LIMITED)
    lines = (GROUP / "memory.stat").read_text("ascii").splitlines()
    parts = dict(line.split() for line in lines)
    return limit - taken + sum(int(parts.get(f"{kind}_file", 0)) for kind in ("active", "inactive"))


def _of_machine() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def stored_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers of a model as they are held: of a quantized one, few."""
    found = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(map(_stored, found.values()))


def _stored(t: Tensor) -> int:
    if not is_traceable_wrapper_subclass(t):
        return t.numel() * t.dtype.itemsize
    inner = (getattr(t, name) for name in t.__tensor_flatten__()[0])
    return sum(_stored(each) for each in inner if isinstance(each, Tensor))


@torch.inference_mode(False)  # tensors that were made in it can never be trained
@torch.no_grad()
def move_to_huge_pages(weights: Iterable[Tensor]) -> int:
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
