"""What kernels in numba share: compiling with a cache, and threads that leave PyTorch's alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

Steps = tuple[int, ...]
"""How many numbers apart the rows, heads, slots and so on of a buffer are."""


def compiled(function: Callable[..., None], fastmath: Collection[str] = ()) -> Callable[..., None]:
    """The function in machine code, without the interpreter's lock; kept for the next process.

    Args:
        function: in the part of Python that numba knows.
        fastmath: what LLVM may do to sums and products, by its own names.
    """
    how = {"nogil": True, "fastmath": set(fastmath)}
    try:
        return numba.njit(function, cache=True, **how)
    except RuntimeError:  # nowhere to keep it: neither beside this file nor in the user's cache
        return numba.njit(function, **how)


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


def in_lines(t: torch.Tensor) -> tuple[np.ndarray, Steps]:
    """The memory under a buffer or a view of one, and where its lines begin in it.

    An array of several dimensions with gaps between its lines is to numba one whose lines may have
    gaps too, and loops over those are not made into vectors.

    Args:
        t: [..., dim], on the CPU. Where the numbers of a line are not side by side
            it is copied, and what is written to the copy is lost.
    """
    t = t.detach() if t.stride(3) == 1 else t.detach().contiguous()
    steps = t.stride()
    last = sum((n - 1) * step for n, step in zip(t.shape, steps, strict=True))
    return t.as_strided((last + 1,), (1,)).numpy(), steps[:-1]


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
