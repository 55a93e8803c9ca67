"""What kernels in numba share: compiling with a cache, and threads that leave PyTorch's alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numba
import numpy as np
import torch


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
