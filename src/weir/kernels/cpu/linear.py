"""Products of a few rows with a weight on the CPU: what `torch.nn.functional.linear` does.

A decode step multiplies few rows with every weight, so that nothing ought to take time but to read
the weights once, in order. Roofline: the bytes of a weight over the bandwidth of memory. A BLAS is
made for many rows, and how near it comes with few differs from machine to machine; so
`weir.choose_products` measures. Sums are float32, in another order than PyTorch's; numbers of
bfloat16, and of 8 bits, are widened on the way.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn import functional as F

from weir.kernels.cpu.compilation import (
    ANY_ORDER,
    bytes_at,
    compile_kernel,
    floats_at,
    longs_at,
    shorts_at,
)
from weir.kernels.cpu.linear_int8 import few_rows_int8
from weir.kernels.cpu.linear_tiles import LINES, tiles
from weir.kernels.cpu.threads import TeamKernel, take_part, threads_for
from weir.kernels.cpu.vectors import as_float, lanes

_WORTH_A_THREAD = 2**15
"""Numbers of a weight below which a thread of their own costs more than it saves."""
_SOME = 5
"""Rows from which on tiles are faster than line by line."""


@njit(nogil=True, fastmath=set(ANY_ORDER))
def _two_products(a: np.ndarray, b: np.ndarray, row: np.ndarray) -> tuple[np.float32, np.float32]:
    """Inner products of two lines, as they are stored, with a row."""
    p = q = np.float32(0.0)
    for j in range(row.shape[0]):
        p += as_float(a[j]) * row[j]
        q += as_float(b[j]) * row[j]
    return p, q


def _one_row(
    bits: int,
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    added: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """One row with two lines at a time, far from each other: processors fetch ahead what is read in
    order, and two such streams come faster than one. Of an odd number the last is read twice.

    All ways to multiply are called so: with integers, since numba takes longer to look at arrays
    than it takes to multiply with a small one.

    Args:
        bits: of a number of the weight: 32 for float32, 16 for bfloat16, 8 for int8.
        rows, inputs, outputs: how many there are.
        x: address of float32 [rows, inputs].
        weight: address of [outputs, inputs].
        added: address of float32 [outputs], or 0: what is added to sums, or with int8 what they
            are multiplied by.
        out: address of float32 [rows, outputs], of which `start` to `stop` are written.
        start, stop: which outputs.
    """
    row, found = floats_at(x, (rows, inputs))[0], floats_at(out, (rows, outputs))[0]
    bias = factors = floats_at(added, (1, outputs))[0]
    floats, halves = floats_at(weight, (outputs, inputs)), shorts_at(weight, (outputs, inputs))
    bytes_ = bytes_at(weight, (outputs, inputs))
    half = (stop - start + 1) // 2
    for i in range(start, start + half):
        far = min(i + half, stop - 1)
        if bits == 32:
            p, q = _two_products(floats[i], floats[far], row)
        elif bits == 16:
            p, q = _two_products(halves[i], halves[far], row)
        else:
            p, q = _two_products(bytes_[i], bytes_[far], row)
            found[i], found[far] = p * factors[i], q * factors[far]
            continue
        found[i] = p + bias[i] if added else p
        found[far] = q + bias[far] if added else q


def _few_rows(
    bits: int,
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    added: int,
    out: int,
    start: int,
    stop: int,
) -> None:
    """As `_one_row`, of float32 and bfloat16: row by row with a line of the
    weight, which stays near after the first.
    """
    given, found = floats_at(x, (rows, inputs)), floats_at(out, (rows, outputs))
    halves = shorts_at(weight, (outputs, inputs))
    bias, wide = floats_at(added, (1, outputs)), np.empty(inputs, np.float32)
    for i in range(start, stop):
        line_at = weight + 4 * inputs * i
        if bits == 16:
            line_at, narrow = wide.ctypes.data, halves[i]
            for j in range(inputs):
                wide[j] = as_float(narrow[j])
        line = floats_at(line_at, (1, inputs))[0]
        for r in range(rows):
            row = given[r]
            total = np.float32(0.0)
            for j in range(inputs):
                total += line[j] * row[j]
            found[r, i] = total + bias[0, i] if added else total


_compiled_one_row, _compiled_few_rows = (
    compile_kernel(way, fastmath=ANY_ORDER) for way in (_one_row, _few_rows)
)


_ONE, _TILES, _FEW, _FEW_INT8 = range(4)
"""Ways to multiply."""


def way_of(rows: int, bits: int, outputs: int) -> tuple[int, int]:
    """Choose the kernel for some rows and a weight, and its first argument."""
    if rows == 1:
        return _ONE, bits
    if rows >= _SOME and outputs >= LINES:
        return _TILES, lanes() << 8 | bits
    # Of 8 bits as many rows as there are registers for, with the sums of two lines.
    return (_FEW, bits) if bits > 8 else (_FEW_INT8, lanes() // 4)


@njit(nogil=True)
def multiply_part(
    way: int,
    first: int,
    rows: int,
    inputs: int,
    outputs: int,
    x: int,
    weight: int,
    added: int,
    out: int,
    part: int,
    parts: int,
) -> tuple[int, int]:
    """Multiply with one of `parts` parts of a weight; returns the range of its outputs.

    `way` and `first` are from `way_of`, the others as for `_one_row`.
    """
    # Of whole tiles, but for what is left over.
    whole = outputs // LINES
    start = LINES * (whole * part // parts)
    stop = LINES * (whole * (part + 1) // parts) if part + 1 < parts else outputs
    if start < stop:
        if way == _ONE:
            _compiled_one_row(first, rows, inputs, outputs, x, weight, added, out, start, stop)
        elif way == _TILES:
            bits = first & 255
            tiles(first >> 8, bits, rows, inputs, outputs, x, weight, added, out, start, stop)
        elif way == _FEW:
            _compiled_few_rows(first, rows, inputs, outputs, x, weight, added, out, start, stop)
        else:
            few_rows_int8(first, rows, inputs, outputs, x, weight, added, out, start, stop)
    return start, stop


def _multiply_parts(address: int) -> None:
    """Products of some outputs, part after part; threads share them."""
    n = longs_at(address, (1, 11))[0]
    part = take_part(address)
    while part < n[1]:
        multiply_part(n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], part, n[1])
        part = take_part(address)


_multiply_together = TeamKernel(_multiply_parts)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear` without gradients; refuses what that refuses, in its words.

    Args:
        x: [..., inputs], of the weight's type.
        weight: [outputs, inputs], float32 or bfloat16, on the CPU; copied if not contiguous.
        bias: [outputs], or None.

    Returns:
        [..., outputs], of the weight's type.
    """
    out = _multiply(x, weight, None, bias)
    if out is None:
        return F.linear(x, weight, bias)
    return out.to(torch.bfloat16) if weight.dtype is torch.bfloat16 else out


def linear_int8(x: Tensor, numbers: Tensor, scale: Tensor) -> Tensor:
    """`torch.nn.functional.linear` of a weight of 8 bits, `numbers * scale[:, None]`.

    Args:
        x: [..., inputs], float32 or bfloat16, without gradients.
        numbers: [outputs, inputs], int8, on the CPU; copied if not contiguous.
        scale: [outputs].

    Returns:
        [..., outputs], of the type of `x`.
    """
    out = _multiply(x, numbers, scale, None)
    if out is None:
        return F.linear(x, numbers.to(x.dtype) * scale.to(x.dtype)[:, None])
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def _multiply(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """The product, in float32; None where sizes do not go together, which machine code that gets
    addresses would not notice.
    """
    outputs, inputs = weight.shape
    *before, width = x.shape or (0,)
    added = bias if scale is None else scale
    if width != inputs or not (inputs and outputs):
        return None
    if added is not None:
        if not added.is_cpu or added.shape != (outputs,):
            return None
        added = _as_floats(added)
    rows, bits = x.numel() // inputs, 8 * weight.itemsize
    x, weight = _as_floats(x), weight.contiguous()
    out = x.new_empty((*before, outputs))
    _multiply_together(
        threads_for(outputs * inputs, _WORTH_A_THREAD),
        *way_of(rows, bits, outputs),
        rows,
        inputs,
        outputs,
        x.data_ptr(),
        weight.data_ptr(),
        0 if added is None else added.data_ptr(),
        out.data_ptr(),
    )
    return out


def _as_floats(t: Tensor) -> Tensor:
    """A tensor as kernels read it by its address: float32 and contiguous."""
    return t if t.dtype is torch.float32 and t.is_contiguous() else t.float().contiguous()
