"""Threads for kernels: PyTorch's for work that takes microseconds, and Python's for longer work.

Handing work to a thread of Python takes as long as a small product of matrices. PyTorch's
operations run in threads of OpenMP, which wait for a while in a loop before they sleep. Short
kernels (`TeamKernel`) run in the same threads, so they add no threads to PyTorch's. `GOMP_parallel`
starts these kernels; it is the function of GNU's and Intel's OpenMP to which GCC translates
`#pragma omp parallel`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from weir.kernels.cpu.compilation import compile_callback
from weir.kernels.cpu.vectors import LONG

_forked = False
PARTS = 2
"""Number of parts of the work for each thread, so that a thread that is late leaves some parts to
the others.
"""


class TeamKernel:
    """A kernel that PyTorch's threads run together, each taking part after part.

    Args:
        function: takes the address of integers of 64 bits: the number of the next part, the number
            of parts, and then the arguments of the call. It calls `take_part` with this address
            until no parts are left.
    """

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function

    def compile(self) -> Any:
        """Return the function in machine code."""
        return _callback(self._function)

    def __call__(self, threads: int, *arguments: int) -> None:
        """Run with integers as arguments, in `threads` threads. If PyTorch's threads cannot be
        used, for example in a forked process, all parts run in the calling thread.
        """
        parts = threads * PARTS if threads > 1 else 1
        numbers = (ctypes.c_int64 * (2 + len(arguments)))(0, parts, *arguments)
        address = ctypes.addressof(numbers)
        run = self.compile()
        start = None if threads == 1 or _forked else _team()
        if start is None:
            run.ctypes(address)
        else:
            start(run.address, address, threads, 0)


@cache
def _callback(function: Callable[[int], None]) -> Any:
    return compile_callback(function)


@lru_cache
def _team() -> Any:
    """Return `GOMP_parallel` of the OpenMP that PyTorch is linked with; None if it cannot be
    found.
    """
    try:
        start = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None
    start.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    start.restype = None
    return start


@intrinsic
def take_part(_typing: Any, address: Any) -> Any:
    """Return the number of the next part of a `TeamKernel`, and take it from the other threads."""

    def write(_context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        place = builder.inttoptr(given[0], LONG.as_pointer())
        return builder.atomic_rmw("add", place, LONG(1), "monotonic")

    return types.int64(types.uintp), write


@intrinsic
def add_to(_typing: Any, address: Any, number: Any) -> Any:
    """Add to the number at an address, atomically, and return the number that was there. A thread
    that reads the new number in `wait_until` also sees everything that this thread wrote before.
    """

    def write(_context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        place = builder.inttoptr(given[0], LONG.as_pointer())
        return builder.atomic_rmw("add", place, given[1], "acq_rel")

    return types.int64(types.uintp, types.int64), write


_YIELDS = hasattr(os, "sched_yield")
SPINS = 2**14
"""How often `wait_until` reads the number before it begins to yield the processor: about 20 µs."""


@intrinsic
def wait_until(_typing: Any, address: Any, number: Any) -> Any:
    """Wait in a loop until the number at an address is at least `number`."""

    def write(_context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        place = builder.inttoptr(given[0], LONG.as_pointer())
        start = builder.block
        look, spin, done = (builder.append_basic_block() for _ in range(3))
        builder.branch(look)
        builder.position_at_end(look)
        turn = builder.phi(LONG)
        turn.add_incoming(LONG(0), start)
        found = builder.load_atomic(place, "acquire", 8)
        builder.cbranch(builder.icmp_signed(">=", found, given[1]), done, spin)
        builder.position_at_end(spin)
        if _YIELDS:
            late = builder.icmp_signed(">", turn, LONG(SPINS))
            with builder.if_then(late, likely=False):
                kind = ir.FunctionType(ir.IntType(32), [])
                builder.call(get_or_insert_function(builder.module, kind, "sched_yield"), [])
        turn.add_incoming(builder.add(turn, LONG(1)), builder.block)
        builder.branch(look)
        builder.position_at_end(done)
        return _context.get_dummy_value()

    return types.void(types.uintp, types.int64), write


def threads_for(work: int, worth: int) -> int:
    """Return the number of threads for some work. If there are several, each has at least `worth`
    of it to do.
    """
    return max(1, min(torch.get_num_threads(), work // worth))


def run_in_threads(part: Callable[[int, int], None], count: int, most: int) -> None:
    """Call `part(start, stop)` for ranges that make up `range(count)`, each in a thread.

    Threads are Python's. They are kept for later calls, because starting a thread takes even
    longer than handing work to one.

    Args:
        part: calls a kernel that releases the interpreter's lock. It must keep the kernel's inputs
            alive, because Ctrl-C ends the wait for a thread, but not the thread.
        count: one or more.
        most: largest useful number of threads; there are never more than PyTorch has.
    """
    threads = min(torch.get_num_threads(), count, most)
    if threads <= 1:
        part(0, count)
        return
    (start, stop), *others = pairwise([count * thread // threads for thread in range(threads + 1)])
    pool = _pool(threads - 1)
    waiting = [pool.submit(part, *cut) for cut in others]
    part(start, stop)
    for future in waiting:
        future.result()


def run_on_rows(function: Callable[..., None], arrays: Sequence[np.ndarray], most: int) -> None:
    """Call a function with arrays that are cut along their first axis, each part in a thread."""

    def part(start: int, stop: int) -> None:
        function(*(array[start:stop] for array in arrays))

    run_in_threads(part, len(arrays[0]), most)


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="weir kernels")


def _forget_threads() -> None:
    """Prepare a forked process. It has none of its parent's threads, and would wait forever for
    those of OpenMP.
    """
    global _forked
    _forked = True
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
