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

from weir.kernels.numba_tiles import LINES, tiles, tiles_of_halves
from weir.kernels.numba_tools import compiled

_WORTH_A_THREAD = 2**19
"""Numbers of a weight below which a thread of their own costs more than it saves."""


def _each(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, out: np.ndarray, start: int, stop: int
) -> None:
    """Row by row with a line of the weight, which stays near after the first."""
    for i in range(start, stop):
        line = weight[i]
        for r in range(x.shape[0]):
            row = x[r]
            total = np.float32(0.0)
            for j in range(line.shape[0]):
                total += line[j] * row[j]
            out[r, i] = total + bias[i] if bias.shape[0] else total


def _each_of_halves(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, out: np.ndarray, start: int, stop: int
) -> None:
    """The weight as bits of bfloat16, which are the upper half of those of a float32."""
    bits = np.empty(weight.shape[1], np.int32)
    line = bits.view(np.float32)
    for i in range(start, stop):
        halves = weight[i]
        for j in range(halves.shape[0]):
            bits[j] = np.int32(halves[j]) << np.int32(16)
        for r in range(x.shape[0]):
            row = x[r]
            total = np.float32(0.0)
            for j in range(line.shape[0]):
                total += line[j] * row[j]
            out[r, i] = total + bias[i] if bias.shape[0] else total


def _each_of_bytes(
    x: np.ndarray, numbers: np.ndarray, scale: np.ndarray, out: np.ndarray, start: int, stop: int
) -> None:
    """The weight as whole numbers of 8 bits, each line with a scale."""
    line = np.empty(numbers.shape[1], np.float32)
    for i in range(start, stop):
        read = numbers[i]
        for j in range(read.shape[0]):
            line[j] = read[j]
        for r in range(x.shape[0]):
            row = x[r]
            total = np.float32(0.0)
            for j in range(line.shape[0]):
                total += line[j] * row[j]
            out[r, i] = total * scale[i]


def _one(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, out: np.ndarray, start: int, stop: int
) -> None:
    """One row. Two lines at a time, far from each other: processors fetch ahead what is read in
    order, and two such streams come faster than one.
    """
    row, half = x[0], (stop - start) // 2
    for i in range(start, start + half):
        a, b = weight[i], weight[i + half]
        p = q = np.float32(0.0)
        for j in range(row.shape[0]):
            p += a[j] * row[j]
            q += b[j] * row[j]
        out[0, i] = p + bias[i] if bias.shape[0] else p
        out[0, i + half] = q + bias[i + half] if bias.shape[0] else q
    for i in range(start + 2 * half, stop):
        read, total = weight[i], np.float32(0.0)
        for j in range(row.shape[0]):
            total += read[j] * row[j]
        out[0, i] = total + bias[i] if bias.shape[0] else total


def _one_of_halves(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, out: np.ndarray, start: int, stop: int
) -> None:
    """As `_one`, the weight as bits of bfloat16; a bit pattern becomes a number where it is read,
    and not in memory.
    """
    row, half = x[0], (stop - start) // 2
    for i in range(start, start + half):
        a, b = weight[i], weight[i + half]
        p = q = np.float32(0.0)
        for j in range(row.shape[0]):
            p += np.int32(np.int32(a[j]) << 16).view(np.float32) * row[j]
            q += np.int32(np.int32(b[j]) << 16).view(np.float32) * row[j]
        out[0, i] = p + bias[i] if bias.shape[0] else p
        out[0, i + half] = q + bias[i + half] if bias.shape[0] else q
    for i in range(start + 2 * half, stop):
        read, total = weight[i], np.float32(0.0)
        for j in range(row.shape[0]):
            total += np.int32(np.int32(read[j]) << 16).view(np.float32) * row[j]
        out[0, i] = total + bias[i] if bias.shape[0] else total


def _one_of_bytes(
    x: np.ndarray, numbers: np.ndarray, scale: np.ndarray, out: np.ndarray, start: int, stop: int
) -> None:
    """As `_one`, the weight as whole numbers of 8 bits, each line with a scale."""
    row, half = x[0], (stop - start) // 2
    for i in range(start, start + half):
        a, b = numbers[i], numbers[i + half]
        p = q = np.float32(0.0)
        for j in range(row.shape[0]):
            p += np.float32(a[j]) * row[j]
            q += np.float32(b[j]) * row[j]
        out[0, i], out[0, i + half] = p * scale[i], q * scale[i + half]
    for i in range(start + 2 * half, stop):
        read, total = numbers[i], np.float32(0.0)
        for j in range(row.shape[0]):
            total += np.float32(read[j]) * row[j]
        out[0, i] = total * scale[i]


_FASTMATH = ("reassoc", "contract", "nsz")
# What LLVM may do to add in parallel; infinities and NaN keep their meaning.
_run_each, _run_each_of_halves, _run_each_of_bytes = (
    compiled(way, fastmath=_FASTMATH) for way in (_each, _each_of_halves, _each_of_bytes)
)
_run_one, _run_one_of_halves, _run_one_of_bytes = (
    compiled(way, fastmath=_FASTMATH) for way in (_one, _one_of_halves, _one_of_bytes)
)
_SOME = 5
"""Rows from which on tiles are faster than line by line."""
_NO_BIAS = np.empty(0, np.float32)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` without gradients.

    Args:
        x: [..., inputs], of the weight's type.
        weight: [outputs, inputs], float32 or bfloat16, on the CPU; copied if not contiguous.
        bias: [outputs], or None.

    Returns:
        [..., outputs], of the weight's type.
    """
    outputs, inputs = weight.shape
    rows = x.reshape(-1, inputs)
    out = torch.empty(len(rows), outputs, dtype=torch.float32, device="cpu")
    halves = weight.dtype == torch.bfloat16
    matrix = weight.detach().contiguous()  # tiles read by address
    matrix = matrix.view(torch.int16) if halves else matrix
    added = _NO_BIAS if bias is None else bias.detach().float().numpy()
    given = rows.detach().float().contiguous().numpy(), matrix.numpy(), added, out.numpy()
    if len(rows) == 1:
        part = partial(_run_one_of_halves if halves else _run_one, *given)
    elif len(rows) < _SOME or outputs < LINES:
        part = partial(_run_each_of_halves if halves else _run_each, *given)
    else:
        part = partial(tiles_of_halves if halves else tiles, _widest(), *given)
    _spread(part, outputs, weight.numel())
    return out.to(weight.dtype).view(*x.shape[:-1], outputs)


def linear8(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """`torch.nn.functional.linear` of a weight of 8 bits, `numbers * scale[:, None]`.

    Args:
        x: [..., inputs], float32 or bfloat16, without gradients.
        numbers: [outputs, inputs], int8, contiguous, on the CPU.
        scale: [outputs].

    Returns:
        [..., outputs], of the type of `x`.
    """
    outputs, inputs = numbers.shape
    rows = x.detach().float().reshape(-1, inputs).contiguous()
    out = torch.empty(len(rows), outputs, dtype=torch.float32, device="cpu")
    scales = scale.detach().float().contiguous()
    given = rows.numpy(), numbers.detach().numpy(), scales.numpy(), out.numpy()
    run = _run_one_of_bytes if len(rows) == 1 else _run_each_of_bytes
    _spread(partial(run, *given), outputs, numbers.numel())
    return out.to(x.dtype).view(*x.shape[:-1], outputs)


@lru_cache
def _widest() -> int:
    """Rows of a tile: as many as the numbers of a vector, where there are 32 registers of 16."""
    return 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8


def _spread(part: Callable[[int, int], None], outputs: int, size: int) -> None:
    """All outputs, by as many threads as PyTorch's and as are worth it.

    Threads of Python's, not numba's: those would change how many PyTorch uses. They stay, since to
    start one takes as long as many a product.
    """
    threads = min(torch.get_num_threads(), max(1, size // _WORTH_A_THREAD), outputs)
    if threads == 1:
        part(0, outputs)
        return
    # At even places, so that outputs go in the same pairs however many threads there are.
    cuts = [outputs * thread // threads // 2 * 2 for thread in range(threads)] + [outputs]
    (start, stop), *others = pairwise(cuts)
    pool = _pool(threads - 1)
    waiting = [pool.submit(part, *cut) for cut in others]
    part(start, stop)
    for each in waiting:
        each.result()


@lru_cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="weir products")


if hasattr(os, "register_at_fork"):  # a fork has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)
