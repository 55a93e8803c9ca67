"""Products of a few rows with a weight on the CPU: what `torch.nn.functional.linear` does.

A decode step multiplies few rows with every weight, so that nothing ought to take time but to read
the weights once, in order. Roofline: the bytes of a weight over the bandwidth of memory. A BLAS is
made for many rows, and how near it comes with few differs from machine to machine; so
`weir.choose_products` measures. Sums are float32, in another order than PyTorch's; numbers of
bfloat16, and of 8 bits, are widened on the way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weir.kernels.cpu.compilation import bytes_at, compiled, floats_at, shorts_at
from weir.kernels.cpu.linear_int8 import few_of_bytes
from weir.kernels.cpu.linear_tiles import LINES, tiles, tiles_of_bytes, tiles_of_halves
from weir.kernels.cpu.vectors import lanes

_WORTH_A_THREAD = 2**19
"""Numbers of a weight below which a thread of their own costs more than it saves."""


def _each(
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    bias: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """Row by row with a line of the weight, which stays near after the first.

    All ways to multiply are called so: with integers, since numba takes longer to look at arrays
    than it takes to multiply with a small one.

    Args:
        rows, inputs, outputs: how many there are.
        x: address of float32 [rows, inputs].
        weight: address of [outputs, inputs].
        bias: address of float32 [outputs], or 0.
        out: address of float32 [rows, outputs], of which `start` to `stop` are written.
        start, stop: which outputs.
    """
    given, found = floats_at(x, (rows, inputs)), floats_at(out, (rows, outputs))
    lines, added = floats_at(weight, (outputs, inputs)), floats_at(bias, (1, outputs))
    for i in range(start, stop):
        line = lines[i]
        for r in range(rows):
            row = given[r]
            total = np.float32(0.0)
            for j in range(inputs):
                total += line[j] * row[j]
            found[r, i] = total + added[0, i] if bias else total


def _each_of_halves(
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    bias: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """The weight as bits of bfloat16, which are the upper half of those of a float32."""
    given, found = floats_at(x, (rows, inputs)), floats_at(out, (rows, outputs))
    lines, added = shorts_at(weight, (outputs, inputs)), floats_at(bias, (1, outputs))
    bits = np.empty(inputs, np.int32)
    line = bits.view(np.float32)
    for i in range(start, stop):
        halves = lines[i]
        for j in range(inputs):
            bits[j] = np.int32(halves[j]) << np.int32(16)
        for r in range(rows):
            row = given[r]
            total = np.float32(0.0)
            for j in range(inputs):
                total += line[j] * row[j]
            found[r, i] = total + added[0, i] if bias else total


def _one(
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    bias: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """One row. Two lines at a time, far from each other: processors fetch ahead what is read in
    order, and two such streams come faster than one. Of an odd number the last is read twice.
    """
    row, found = floats_at(x, (rows, inputs))[0], floats_at(out, (rows, outputs))[0]
    lines, added = floats_at(weight, (outputs, inputs)), floats_at(bias, (1, outputs))[0]
    half = (stop - start + 1) // 2
    for i in range(start, start + half):
        far = min(i + half, stop - 1)
        a, b = lines[i], lines[far]
        p = q = np.float32(0.0)
        for j in range(inputs):
            p += a[j] * row[j]
            q += b[j] * row[j]
        found[i] = p + added[i] if bias else p
        found[far] = q + added[far] if bias else q


def _one_of_halves(
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    bias: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """As `_one`, the weight as bits of bfloat16; a bit pattern becomes a number where it is read,
    and not in memory.
    """
    row, found = floats_at(x, (rows, inputs))[0], floats_at(out, (rows, outputs))[0]
    lines, added = shorts_at(weight, (outputs, inputs)), floats_at(bias, (1, outputs))[0]
    half = (stop - start + 1) // 2
    for i in range(start, start + half):
        far = min(i + half, stop - 1)
        a, b = lines[i], lines[far]
        p = q = np.float32(0.0)
        for j in range(inputs):
            p += np.int32(np.int32(a[j]) << 16).view(np.float32) * row[j]
            q += np.int32(np.int32(b[j]) << 16).view(np.float32) * row[j]
        found[i] = p + added[i] if bias else p
        found[far] = q + added[far] if bias else q


def _one_of_bytes(
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    scale: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """As `_one`, the weight as numbers of 8 bits, each line with a scale: float32 [outputs]."""
    row, found = floats_at(x, (rows, inputs))[0], floats_at(out, (rows, outputs))[0]
    lines, scales = bytes_at(weight, (outputs, inputs)), floats_at(scale, (1, outputs))[0]
    half = (stop - start + 1) // 2
    for i in range(start, start + half):
        far = min(i + half, stop - 1)
        a, b = lines[i], lines[far]
        p = q = np.float32(0.0)
        for j in range(inputs):
            p += np.float32(a[j]) * row[j]
            q += np.float32(b[j]) * row[j]
        found[i], found[far] = p * scales[i], q * scales[far]


_FASTMATH = ("reassoc", "contract", "nsz")
# What LLVM may do to add in parallel; infinities and NaN keep their meaning.
_run_each, _run_each_of_halves = (
    compiled(way, fastmath=_FASTMATH) for way in (_each, _each_of_halves)
)
_run_one, _run_one_of_halves, _run_one_of_bytes = (
    compiled(way, fastmath=_FASTMATH) for way in (_one, _one_of_halves, _one_of_bytes)
)
_SOME = 5
"""Rows from which on tiles are faster than line by line."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` without gradients; refuses what that refuses, in its words.

    Args:
        x: [..., inputs], of the weight's type.
        weight: [outputs, inputs], float32 or bfloat16, on the CPU; copied if not contiguous.
        bias: [outputs], or None.

    Returns:
        [..., outputs], of the weight's type.
    """
    outputs, inputs = weight.shape
    *before, width = x.shape or (0,)
    if not (width == inputs and inputs and outputs and _of_each(bias, outputs)):
        return F.linear(x, weight, bias)
    rows = x.numel() // inputs
    halves = weight.dtype is torch.bfloat16
    given, matrix = _floats(x), weight.contiguous()
    added = None if bias is None else _floats(bias)
    out = given.new_empty((*before, outputs))
    sizes_and_addresses = (
        rows,
        inputs,
        outputs,
        given.data_ptr(),
        matrix.data_ptr(),
        0 if added is None else added.data_ptr(),
        out.data_ptr(),
    )
    if rows == 1:
        part = partial(_run_one_of_halves if halves else _run_one, *sizes_and_addresses)
    elif rows < _SOME or outputs < LINES:
        part = partial(_run_each_of_halves if halves else _run_each, *sizes_and_addresses)
    else:
        part = partial(tiles_of_halves if halves else tiles, lanes(), *sizes_and_addresses)
    _spread(part, outputs, outputs * inputs, (given, matrix, added, out))
    return out.to(torch.bfloat16) if halves else out


def linear_int8(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """`torch.nn.functional.linear` of a weight of 8 bits, `numbers * scale[:, None]`.

    Args:
        x: [..., inputs], float32 or bfloat16, without gradients.
        numbers: [outputs, inputs], int8, on the CPU; copied if not contiguous.
        scale: [outputs].

    Returns:
        [..., outputs], of the type of `x`.
    """
    outputs, inputs = numbers.shape
    *before, width = x.shape or (0,)
    if not (width == inputs and inputs and outputs and _of_each(scale, outputs)):
        return F.linear(x, numbers.to(x.dtype) * scale.to(x.dtype)[:, None])
    rows = x.numel() // inputs
    given, matrix, scales = _floats(x), numbers.contiguous(), _floats(scale)
    out = given.new_empty((*before, outputs))
    sizes_and_addresses = (
        rows,
        inputs,
        outputs,
        given.data_ptr(),
        matrix.data_ptr(),
        scales.data_ptr(),
        out.data_ptr(),
    )
    if rows == 1:
        part = partial(_run_one_of_bytes, *sizes_and_addresses)
    elif rows < _SOME or outputs < LINES:
        part = partial(few_of_bytes, _together(), *sizes_and_addresses)
    else:
        part = partial(tiles_of_bytes, lanes(), *sizes_and_addresses)
    _spread(part, outputs, outputs * inputs, (given, matrix, scales, out))
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def _of_each(added: Tensor | None, outputs: int) -> bool:
    """Whether there is a number for each: machine code is told addresses, and asks nobody."""
    return added is None or (added.is_cpu and added.shape == (outputs,))


def _floats(t: Tensor) -> Tensor:
    """A tensor as kernels read it by its address: float32 and contiguous."""
    return t if t.dtype is torch.float32 and t.is_contiguous() else t.float().contiguous()


def _together() -> int:
    """Rows of which sums with two lines stay in registers."""
    return lanes() // 4


def _spread(
    part: Callable[[int, int], None], outputs: int, size: int, held: tuple[Tensor | None, ...]
) -> None:
    """All outputs, by as many threads as PyTorch's and as are worth it.

    Threads of Python's, not numba's: those would change how many PyTorch uses. They stay, since to
    start one takes as long as many a product.

    Args:
        part: makes those from one to another.
        outputs: how many there are, one at least.
        size: numbers of the weight.
        held: whose addresses `part` was told. Threads hold them: Ctrl-C ends the wait for a thread,
            and not the thread.
    """
    threads = min(torch.get_num_threads(), max(1, size // _WORTH_A_THREAD), outputs)
    if threads == 1:
        part(0, outputs)
        return
    cuts = [outputs * thread // threads for thread in range(threads + 1)]
    (start, stop), *others = pairwise(cuts)
    pool = _pool(threads - 1)
    waiting = [pool.submit(_holding, held, part, *cut) for cut in others]
    part(start, stop)
    for each in waiting:
        each.result()


def _holding(held: object, part: Callable[[int, int], None], start: int, stop: int) -> None:
    part(start, stop)


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="weir products")


if hasattr(os, "register_at_fork"):  # a fork has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
