"""Quantizes float32 vectors to 8 or 4 bits, and dequantizes them, on the CPU.

Each vector is stored with its *peak*, the largest absolute number in it.

The results are bit-identical to those of `quantize` and `dequantize` in `weir.slab.quantization`:
the operations are the same and rounded separately, but done in one pass for each vector, from one
buffer into another. Vectors of 4 bits are rotated by a Hadamard matrix before they are
quantized, and can be rotated back when they are dequantized. This rotation has nothing to do with
positions.

Roofline: a division for each number that is quantized, and log2(block) sums for the rotation; a
product for each number that is dequantized.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core.cgutils import for_range
from torch import Tensor

from weir.kernels.cpu.compilation import (
    WHOLE,
    Strides,
    address_of,
    bytes_at,
    compile_kernel,
    floats_at,
    shorts_at,
    with_unit_stride,
)
from weir.kernels.cpu.threads import run_in_threads
from weir.kernels.cpu.vectors import (
    LONG,
    as_float,
    floats,
    llvm_function,
    load_at,
    shuffle,
    store_at,
)

_WORTH_A_THREAD = 2**16
"""For fewer numbers than this, a separate thread costs more than it saves."""
_SIGN = np.int32(0x7FFFFFFF)
_UP = np.float32(12582912.0)
"""A sum with this number has no fractional digits, so adding it rounds to the nearest whole number,
and ties to the even one.
"""


_TOGETHER = 8
"""How many numbers of a vector are processed together when neighbors are added."""


@llvm_function
def _add_neighbors(builder: ir.IRBuilder, x: Any, count: Any) -> None:
    """Do the first three steps of the rotation, which combine `i` with `i + 1`, `i + 2` and `i +
    4`.

    Args:
        builder: builds the code.
        x: address of float32 [count, 8], which is overwritten.
        count: number of vectors.
    """
    numbers = floats(builder, x)
    with for_range(builder, count) as loop:
        place = builder.mul(loop.index, LONG(_TOGETHER))
        vector = load_at(builder, numbers, place, _TOGETHER)
        for width in (1, 2, 4):
            other = shuffle(builder, vector, vector, [i ^ width for i in range(_TOGETHER)])
            sums, rest = builder.fadd(vector, other), builder.fsub(other, vector)
            places = [i + _TOGETHER if i & width else i for i in range(_TOGETHER)]
            vector = shuffle(builder, sums, rest, places)
        store_at(builder, vector, numbers, place)


@njit(nogil=True)
def _rotate(at: int, dim: int, block: float) -> None:
    """Multiply each block of a vector [dim], float32, by the Hadamard matrix of 1 and -1."""
    wide, width = floats_at(at, (1, dim))[0], 1
    if block >= _TOGETHER:
        _add_neighbors(at, dim // _TOGETHER)
        width = _TOGETHER
    while width < block:
        for first in range(0, dim, 2 * width):
            for i in range(first, first + width):
                one, other = wide[i], wide[i + width]
                wide[i], wide[i + width] = one + other, one - other
        width *= 2


def _write_int8(
    x_at: int,
    steps: Strides,
    codes_at: int,
    code_steps: Strides,
    peaks_at: int,
    peak_steps: Strides,
    shape: tuple[int, int, int, int],
    levels: np.float32,
    low: np.float32,
    high: np.float32,
) -> None:
    batch, heads, count, dim = shape
    x, codes = floats_at(x_at, WHOLE)[0], bytes_at(codes_at, WHOLE)[0]
    peaks, all_bits = shorts_at(peaks_at, WHOLE)[0], x.view(np.int32)
    peak_bits = np.empty(1, np.int32)
    peak = peak_bits.view(np.float32)
    for row in range(batch):
        for head in range(heads):
            at = row * steps[0] + head * steps[1]
            to = row * code_steps[0] + head * code_steps[1]
            top = row * peak_steps[0] + head * peak_steps[1]
            for _ in range(count):
                # Without their sign, numbers have the same order as their bits.
                bits, largest = all_bits[at : at + dim], np.int32(0)
                for i in range(dim):
                    largest = max(largest, bits[i] & _SIGN)
                peak_bits[0] = largest
                peak[0] = min(max(peak[0], low), high)
                # Round to bfloat16, the upper half of the bits; ties go to the even one.
                odd = (peak_bits[0] >> np.int32(16)) & np.int32(1)
                half = (peak_bits[0] + np.int32(0x7FFF) + odd) >> np.int32(16)
                peaks[top] = half
                peak_bits[0] = half << np.int32(16)
                step = peak[0] / levels
                vector, written = x[at : at + dim], codes[to : to + dim]
                for i in range(dim):
                    written[i] = np.int8(np.int32((vector[i] / step + _UP) - _UP))
                at += steps[2]
                to += code_steps[2]
                top += peak_steps[2]


def _write_int4(
    x_at: int,
    steps: Strides,
    codes_at: int,
    code_steps: Strides,
    peaks_at: int,
    peak_steps: Strides,
    shape: tuple[int, int, int, int],
    levels: np.float32,
    low: np.float32,
    high: np.float32,
    most: np.float32,
    block: np.float32,
    root: np.float32,
) -> None:
    batch, heads, count, dim = shape
    x, codes = floats_at(x_at, WHOLE)[0], bytes_at(codes_at, WHOLE)[0].view(np.uint8)
    peaks, wide, half = shorts_at(peaks_at, WHOLE)[0], np.empty(dim, np.float32), dim // 2
    peak, bits = np.empty(1, np.float32), wide.view(np.int32)
    for row in range(batch):
        for head in range(heads):
            for n in range(count):
                at = row * steps[0] + head * steps[1] + n * steps[2]
                for i in range(dim):
                    wide[i] = min(max(x[at + i], -most), most) / block
                _rotate(wide.ctypes.data, dim, block)
                for i in range(dim):
                    wide[i] = min(max(wide[i] * root, -high), high)
                largest = np.int32(0)
                for i in range(dim):
                    largest = max(largest, bits[i] & _SIGN)
                peak.view(np.int32)[0] = largest
                mantissa, exponent = math.frexp(min(max(peak[0], low), high))
                peak[0] = math.ldexp(np.rint(mantissa * 16) / 16, exponent)
                top = row * peak_steps[0] + head * peak_steps[1] + n * peak_steps[2]
                # This is exact, because the peak has four significant bits.
                peaks[top] = peak.view(np.int32)[0] >> np.int32(16)
                step = peak[0] / levels
                to = row * code_steps[0] + head * code_steps[1] + n * code_steps[2]
                for i in range(half):
                    one = np.rint(min(max(wide[i] / step, -levels), levels))
                    other = np.rint(min(max(wide[i + half] / step, -levels), levels))
                    codes[to + i] = np.uint8(np.int32(one) + 8 | (np.int32(other) + 8) << 4)


@njit(nogil=True)
def read_head(
    codes_at: int,
    steps: Strides,
    peaks_at: int,
    peak_steps: Strides,
    levels: float,
    row: int,
    head: int,
    out: np.ndarray,
    to: int,
    out_step: int,
    count: int,
    dim: int,
) -> None:
    """Dequantize vectors of one head, stored in 8 bits, to float32.

    Args:
        codes_at, steps, peaks_at, peak_steps: the results of `address_of` for numbers and peaks.
        levels: number of steps in a peak.
        row, head: which head of which row.
        out: the output, written from place `to` on; vectors are `out_step` apart.
        to, out_step: see `out`.
        count, dim: number of vectors, and of numbers in each.
    """
    codes, peaks = bytes_at(codes_at, WHOLE)[0], shorts_at(peaks_at, WHOLE)[0]
    at = row * steps[0] + head * steps[1]
    top = row * peak_steps[0] + head * peak_steps[1]
    most = np.float32(levels)
    for _ in range(count):
        step = as_float(peaks[top]) / most
        written, vector = codes[at : at + dim], out[to : to + dim]
        for i in range(dim):
            vector[i] = np.float32(written[i]) * step
        at += steps[2]
        top += peak_steps[2]
        to += out_step


def _read_int8(
    codes_at: int,
    steps: Strides,
    peaks_at: int,
    peak_steps: Strides,
    levels: np.float32,
    shape: tuple[int, int, int, int],
    out_at: int,
    out_steps: Strides,
) -> None:
    batch, heads, count, dim = shape
    out, step = floats_at(out_at, WHOLE)[0], out_steps[2]
    for row in range(batch):
        for head in range(heads):
            to = row * out_steps[0] + head * out_steps[1]
            stored = (codes_at, steps, peaks_at, peak_steps, levels)
            read_head(*stored, row, head, out, to, step, count, dim)


def _read_int4(
    codes_at: int,
    steps: Strides,
    peaks_at: int,
    peak_steps: Strides,
    levels: np.float32,
    shape: tuple[int, int, int, int],
    out_at: int,
    out_steps: Strides,
    block: np.float32,
    root: np.float32,
) -> None:
    batch, heads, count, half = shape
    codes, peaks = bytes_at(codes_at, WHOLE)[0].view(np.uint8), shorts_at(peaks_at, WHOLE)[0]
    out = floats_at(out_at, WHOLE)[0]
    for row in range(batch):
        for head in range(heads):
            for n in range(count):
                at = row * steps[0] + head * steps[1] + n * steps[2]
                to = row * out_steps[0] + head * out_steps[1] + n * out_steps[2]
                top = row * peak_steps[0] + head * peak_steps[1] + n * peak_steps[2]
                step = as_float(peaks[top]) / levels / root
                vector, wide = codes[at : at + half], out[to : to + 2 * half]
                for i in range(half):
                    wide[i] = np.float32(np.int32(vector[i] & 15) - 8)
                    wide[half + i] = np.float32(np.int32(vector[i] >> 4) - 8)
                # Sums of whole numbers are exact in any order.
                _rotate(out_at + 4 * to, 2 * half, block)
                for i in range(2 * half):
                    wide[i] *= step


_compiled_write_int8, _compiled_read_int8 = compile_kernel(_write_int8), compile_kernel(_read_int8)
_compiled_write_int4, _compiled_read_int4 = compile_kernel(_write_int4), compile_kernel(_read_int4)


def quantize_int8(
    x: Tensor, codes: Tensor, peaks: Tensor, levels: int, low: float, high: float
) -> None:
    """Quantize vectors into buffers.

    Args:
        x: finite numbers [batch, heads, n, dim], float32.
        codes: written [batch, heads, n, dim], int8.
        peaks: written [batch, heads, n, 1], bfloat16.
        levels: number of steps from 0 to a peak.
        low, high: the smallest and largest peak that is stored; other peaks are clamped.

    Raises:
        WeirError: the last dimension of `codes` is not contiguous.
    """
    _write(_compiled_write_int8, x, codes, peaks, levels, low, high)


def quantize_int4(
    x: Tensor,
    codes: Tensor,
    peaks: Tensor,
    levels: int,
    low: float,
    high: float,
    most: float,
    block: int,
) -> None:
    """Rotate vectors and quantize them into buffers, as `quantize_int8` does.

    Args:
        x, peaks, levels, low, high: as in `quantize_int8`.
        codes: written [batch, heads, n, dim / 2], uint8.
        most: numbers are clamped to -most ... most before they are rotated, and to -high ... high
            afterwards.
        block: how many numbers are rotated together.
    """
    numbers = levels, low, high, most, block, math.sqrt(block)
    _write(_compiled_write_int4, x, codes, peaks, *numbers)


def _write(kernel: Any, x: Tensor, codes: Tensor, peaks: Tensor, *numbers: float) -> None:
    if not x.numel():
        return
    x = with_unit_stride(x)
    codes, peaks = (with_unit_stride(t, writable=True) for t in (codes, peaks))
    more = tuple(map(np.float32, numbers))

    def some(start: int, stop: int) -> None:
        cut = [t[:, :, start:stop] for t in (x, codes, peaks)]
        kernel(*(part for t in cut for part in address_of(t)), tuple(cut[0].shape), *more)

    run_in_threads(some, x.shape[2], x.numel() // _WORTH_A_THREAD)


def dequantize_int8(codes: Tensor, peaks: Tensor, levels: int, out: Tensor) -> None:
    """Read vectors from buffers into `out` [batch, heads, n, dim], float32; see `quantize_int8`."""
    _read(_compiled_read_int8, codes, peaks, levels, out)


def dequantize_int4(codes: Tensor, peaks: Tensor, levels: int, out: Tensor, block: int = 1) -> None:
    """Read vectors like `dequantize_int8`, and rotate blocks of `block` numbers back; see
    `quantize_int4`.
    """
    _read(_compiled_read_int4, codes, peaks, levels, out, block, math.sqrt(block))


def _read(
    kernel: Any, codes: Tensor, peaks: Tensor, levels: int, out: Tensor, *numbers: float
) -> None:
    if not codes.numel():
        return
    codes, peaks = with_unit_stride(codes), with_unit_stride(peaks)
    out = with_unit_stride(out, writable=True)
    more = tuple(map(np.float32, numbers))

    def some(start: int, stop: int) -> None:
        cut = [t[:, :, start:stop] for t in (codes, peaks, out)]
        stored, scales, into = map(address_of, cut)
        kernel(*stored, *scales, np.float32(levels), tuple(cut[0].shape), *into, *more)

    run_in_threads(some, out.shape[2], out.numel() // _WORTH_A_THREAD)
