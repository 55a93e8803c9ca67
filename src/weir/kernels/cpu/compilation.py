"""What kernels in numba share: compiling with a cache, and threads that leave PyTorch's alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

from weir.errors import WeirError

Steps = tuple[int, ...]
"""How many numbers apart the rows, heads, slots and so on of a buffer are."""


def compiled(function: Callable[..., None], fastmath: Collection[str] = ()) -> Callable[..., None]:
    """The function in machine code, without the interpreter's lock; kept for the next process.

    Args:
        function: in the part of Python that numba knows.
        fastmath: what LLVM may do to sums and products, by its own names.
    """
    made = numba.njit(function, nogil=True, fastmath=set(fastmath))
    # Nowhere to keep it, neither beside this file nor for the user, or another numba's cache.
    with suppress(RuntimeError, AttributeError):
        made._cache = _Kept(function)
    return made


@lru_cache
def sources(path: Path) -> str:
    """What tells a file of kernels, and those that it imports, from those of another version."""
    if not path.exists():  # weir in an archive, of which numba has looked at the date
        return ""
    text = path.read_text(encoding="utf-8")
    found = hashlib.sha256(text.encode())
    for name in re.findall(r"^from weir\.kernels\.([\w.]+) import", text, re.MULTILINE):
        below = path.parents[1].joinpath(*name.split(".")).with_suffix(".py")
        found.update(sources(below).encode())
    return found.hexdigest()


class _Kept(FunctionCache):  # type: ignore[misc, unused-ignore]
    """A function's machine code on disk, made anew after a change of its file or of those below.

    numba looks at the file of the function alone. Kernels share functions of other files, and what
    was kept of one would outlive an upgrade that mends those.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        file = self._cache_file
        file._source_stamp = file._source_stamp, sources(Path(function.__code__.co_filename))

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was kept for some types; None where there is nothing, or it is broken."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # what a broken pickle raises is anything
            with suppress(OSError):
                self.flush()  # or it would be in the way of what is kept next
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep it for the next process, unless the disk is full: then it serves this one alone."""
        with suppress(OSError):
            super().save_overload(sig, data)


def spread(function: Callable[..., None], arrays: Sequence[np.ndarray], limit: int) -> None:
    """Call a function with arrays, cut along their first axis among at most `limit` threads.

    Threads of Python's, not numba's: those would change how many PyTorch uses.
    """
    count = arrays[0].shape[0]
    threads = min(torch.get_num_threads(), count, limit)
    if threads == 1:
        function(*arrays)
        return
    cuts = [count * thread // threads for thread in range(threads + 1)]
    spans = [[array[start:stop] for array in arrays] for start, stop in pairwise(cuts)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda span: function(*span), spans))


def in_lines(t: torch.Tensor, *, written: bool = False) -> torch.Tensor:
    """The tensor itself, or a copy where the numbers of a line [..., dim] are not side by side.

    Hold it until the kernel has returned, which is given no more than its `address`.

    Args:
        t: on the CPU.
        written: lines are written, which would be lost with a copy.

    Raises:
        WeirError: to be written, and the numbers of a line are not side by side.
    """
    if t.stride(-1) == 1 or t.shape[-1] == 1:
        return t
    if written:
        raise WeirError("a kernel writes lines whose numbers lie side by side, and no others")
    return t.contiguous()


def address(t: torch.Tensor) -> tuple[int, Steps]:
    """Where a tensor `in_lines` begins in memory, and how far its lines are apart.

    To hand an array to numba takes several times as long as to hand it numbers; and an array of
    several dimensions with gaps between its lines is to numba one whose lines may have gaps too,
    and loops over those are not made into vectors.
    """
    return t.data_ptr(), t.stride()[:-1]


def _at(number: Any) -> Callable[..., Any]:
    """An array of a type of numbers where an address says, for what runs in numba."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.inttoptr(given[0], context.get_value_type(signature.return_type))

        return types.CPointer(number)(types.uintp), write

    @numba.njit(inline="always")
    def array(address: int, shape: tuple[int, int]) -> Any:
        return numba.carray(pointer(address), shape)

    return array


floats_at, shorts_at, bytes_at = _at(types.float32), _at(types.int16), _at(types.int8)
WHOLE = (1, 2**60)
"""The shape of an array that stands for all memory from an address on, in one line."""
