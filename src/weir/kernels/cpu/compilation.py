"""What kernels in numba share: machine code that is kept, threads, and tensors by their address."""

from __future__ import annotations

import hashlib
import os
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

Strides = tuple[int, ...]
"""How many numbers apart the rows, heads, slots and so on of a buffer are."""


def compile_kernel(
    function: Callable[..., None], fastmath: Collection[str] = ()
) -> Callable[..., None]:
    """The function in machine code, without the interpreter's lock; kept for the next process.

    Args:
        function: in the part of Python that numba knows.
        fastmath: what LLVM may do to sums and products, by LLVM's own names.
    """
    kernel = numba.njit(function, nogil=True, fastmath=set(fastmath))
    # Nowhere to keep it, neither beside this file nor for the user, or another numba's cache.
    with suppress(RuntimeError, AttributeError):
        kernel._cache = _CodeCache(function)
    return kernel


@lru_cache
def source_digest(path: Path) -> str:
    """A checksum of a kernel's file and of all files of kernels that it imports."""
    if not path.exists():  # weir in an archive; numba looks at the date of that
        return ""
    text = path.read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode())
    for name in re.findall(r"^from weir\.kernels\.([\w.]+) import", text, re.MULTILINE):
        imported = path.parents[1].joinpath(*name.split(".")).with_suffix(".py")
        digest.update(source_digest(imported).encode())
    return digest.hexdigest()


class _CodeCache(FunctionCache):  # type: ignore[misc, unused-ignore]
    """A function's machine code on disk, made anew after a change of any file it is made from.

    numba looks at the file of the function alone. Kernels share functions of other files, and the
    code on disk would outlive an upgrade that mends those.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        super().__init__(function)
        file = self._cache_file
        path = Path(function.__code__.co_filename)
        file._source_stamp = file._source_stamp, source_digest(path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for some types; None where there is none on disk, or it is broken."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a broken pickle may raise anything
            with suppress(OSError):
                self.flush()  # or it would be in the way of the code that is kept next
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep code for the next process, unless the disk is full: then it serves this one."""
        with suppress(OSError):
            super().save_overload(sig, data)


# --- threads


def run_in_threads(
    part: Callable[[int, int], None], count: int, most: int, held: object = None
) -> None:
    """Call `part(start, stop)` for ranges that make up `range(count)`, each in a thread.

    Threads are Python's, not numba's: those would change how many PyTorch uses. They stay, since to
    start one takes as long as many a product.

    Args:
        part: does a range.
        count: one or more.
        most: threads that are worth it; there are no more of them than PyTorch has.
        held: tensors that `part` reads by address. A thread holds them, for Ctrl-C ends the wait
            for a thread and not the thread.
    """
    threads = min(torch.get_num_threads(), count, most)
    if threads <= 1:
        part(0, count)
        return
    cuts = [count * thread // threads for thread in range(threads + 1)]
    (start, stop), *others = pairwise(cuts)
    pool = _pool(threads - 1)
    waiting = [pool.submit(_call_holding, held, part, *cut) for cut in others]
    part(start, stop)
    for future in waiting:
        future.result()


def run_on_rows(function: Callable[..., None], arrays: Sequence[np.ndarray], most: int) -> None:
    """Call a function with arrays that are cut along their first axis, each part in a thread."""

    def part(start: int, stop: int) -> None:
        function(*(array[start:stop] for array in arrays))

    run_in_threads(part, len(arrays[0]), most)


def _call_holding(_held: object, part: Callable[[int, int], None], start: int, stop: int) -> None:
    part(start, stop)


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="weir kernels")


if hasattr(os, "register_at_fork"):  # a fork has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


# --- memory


def with_unit_stride(t: torch.Tensor, *, writable: bool = False) -> torch.Tensor:
    """The tensor, or a copy where the numbers of a line [..., dim] are not side by side.

    Hold it until the kernel has returned, which gets no more than the `address_of` it.

    Args:
        t: on the CPU.
        writable: the kernel writes to it; a copy would lose that.

    Raises:
        WeirError: it is to be written, and the numbers of a line are not side by side.
    """
    if t.stride(-1) == 1 or t.shape[-1] == 1:
        return t
    if writable:
        raise WeirError("a kernel writes lines whose numbers lie side by side, and no others")
    return t.contiguous()


def address_of(t: torch.Tensor) -> tuple[int, Strides]:
    """Where a tensor of `with_unit_stride` begins in memory, and how far its lines are apart.

    To hand an array to numba takes several times as long as to hand it numbers; and to numba an
    array of several dimensions with gaps between its lines may have gaps within lines too, and
    loops over those are not made into vectors.
    """
    return t.data_ptr(), t.stride()[:-1]


def _arrays_of(number: Any) -> Callable[..., Any]:
    """A function for code in numba: an array of such numbers at an address."""

    @intrinsic
    def pointer(_typing: Any, address: Any) -> Any:
        def write(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.inttoptr(given[0], context.get_value_type(signature.return_type))

        return types.CPointer(number)(types.uintp), write

    @numba.njit(inline="always")
    def array(address: int, shape: tuple[int, int]) -> Any:
        return numba.carray(pointer(address), shape)

    return array


floats_at, shorts_at, bytes_at = map(_arrays_of, (types.float32, types.int16, types.int8))
WHOLE = (1, 2**60)
"""The shape of an array that stands for all memory from an address on, in one line."""
