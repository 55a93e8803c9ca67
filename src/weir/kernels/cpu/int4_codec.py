"""Vectors written in 4 bits, rotated, with one peak each, and read as they are stored; float32.

What `quantize` of `weir.slab.quantization` writes and what `dequantize` reads without the rotation,
bit for bit: the same operations in the same order, in one pass for each vector. Roofline: the sums
of the rotation, log2(n) for each number that is written; a product for each that is read.
"""

from __future__ import annotations

import math

import numpy as np
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
from weir.kernels.cpu.vectors import as_float


def _write(
    x_at: int,
    steps: Strides,
    codes_at: int,
    code_steps: Strides,
    peaks_at: int,
    peak_steps: Strides,
    shape: tuple[int, int, int, int],
    block: int,
    root: np.float32,
    levels: np.float32,
    low: np.float32,
    high: np.float32,
    most: np.float32,
) -> None:
    batch, heads, count, dim = shape
    x, codes = floats_at(x_at, WHOLE)[0], bytes_at(codes_at, WHOLE)[0].view(np.uint8)
    peaks, wide, half = shorts_at(peaks_at, WHOLE)[0], np.empty(dim, np.float32), dim // 2
    peak = np.empty(1, np.float32)
    for row in range(batch):
        for head in range(heads):
            for n in range(count):
                at = row * steps[0] + head * steps[1] + n * steps[2]
                for i in range(dim):
                    wide[i] = min(max(x[at + i], -most), most) / np.float32(block)
                width = 1
                while width < block:
                    for first in range(0, dim, 2 * width):
                        for i in range(first, first + width):
                            one, other = wide[i], wide[i + width]
                            wide[i], wide[i + width] = one + other, one - other
                    width *= 2
                largest = np.float32(0.0)
                for i in range(dim):
                    wide[i] = min(max(wide[i] * root, -high), high)
                    largest = max(largest, abs(wide[i]))
                mantissa, exponent = math.frexp(min(max(largest, low), high))
                peak[0] = math.ldexp(np.rint(mantissa * 16) / 16, exponent)
                top = row * peak_steps[0] + head * peak_steps[1] + n * peak_steps[2]
                peaks[top] = peak.view(np.int32)[0] >> np.int32(16)  # exact: it has five bits
                step = peak[0] / levels
                to = row * code_steps[0] + head * code_steps[1] + n * code_steps[2]
                for i in range(half):
                    one = np.rint(min(max(wide[i] / step, -levels), levels))
                    other = np.rint(min(max(wide[i + half] / step, -levels), levels))
                    codes[to + i] = np.uint8(np.int32(one) + 8 | (np.int32(other) + 8) << 4)


def _read(
    codes_at: int,
    steps: Strides,
    peaks_at: int,
    peak_steps: Strides,
    levels: np.float32,
    shape: tuple[int, int, int, int],
    out_at: int,
    out_steps: Strides,
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
                step = as_float(peaks[top]) / levels
                vector = codes[at : at + half]
                below, above = out[to : to + half], out[to + half : to + 2 * half]
                for i in range(half):
                    below[i] = np.float32(np.int32(vector[i] & 15) - 8) * step
                    above[i] = np.float32(np.int32(vector[i] >> 4) - 8) * step


_compiled_write, _compiled_read = compile_kernel(_write), compile_kernel(_read)


def quantize_int4(
    x: Tensor,
    codes: Tensor,
    peaks: Tensor,
    levels: int,
    block: int,
    low: float,
    high: float,
    most: float,
) -> None:
    """Rotate vectors and quantize them into buffers.

    Args:
        x: finite numbers [batch, heads, n, dim], float32.
        codes: written [batch, heads, n, dim / 2], uint8.
        peaks: written [batch, heads, n, 1], bfloat16.
        levels: how many steps make a peak.
        block: numbers that are rotated together.
        low, high: no peak is less or more.
        most: no number is more before it is rotated.

    Raises:
        WeirError: the numbers of a vector do not lie side by side in `codes`.
    """
    if x.numel():
        x = with_unit_stride(x)
        codes, peaks = (with_unit_stride(t, writable=True) for t in (codes, peaks))
        into = *address_of(codes), *address_of(peaks)
        bounds = (np.float32(n) for n in (math.sqrt(block), levels, low, high, most))
        _compiled_write(*address_of(x), *into, tuple(x.shape), block, *bounds)


def dequantize_int4(codes: Tensor, peaks: Tensor, levels: int, out: Tensor) -> None:
    """Read vectors from buffers, rotated as they are, into `out` [batch, heads, n, dim], float32.

    The other arguments are those of `quantize_int4`.
    """
    if codes.numel():
        codes, peaks = with_unit_stride(codes), with_unit_stride(peaks)
        out = with_unit_stride(out, writable=True)
        stored = *address_of(codes), *address_of(peaks), np.float32(levels)
        _compiled_read(*stored, tuple(codes.shape), *address_of(out))
