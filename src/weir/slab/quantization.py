"""Quantization of keys and values to 8 or 4 bits, its error bounds, and dequantization.

A vector x is stored as numbers c of few bits and its *peak*, the largest absolute value in the
vector, or the peaks of groups of its numbers:

    step = peak / levels,  c = round(x / step),  read as c * step

Quantizing is a projection: if a vector that was read is quantized again, it gets the same codes,
bit for bit, in every dtype. So nothing more is lost, however often a slot is packed again. This
holds because the peak is rounded to bfloat16 before it is used, and the number with the largest
absolute value always gets the largest code.

The format `int4` rounds the *rotated* vector, its product with a Hadamard matrix, which spreads
large numbers over all others (QuaRot, Ashkboos et al. 2024, section 3; arXiv:2404.00456). The
matrix is orthogonal and its own inverse, so attention can rotate queries and answers (`hadamard`)
instead of rotating every vector back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from weir import kernels

PEAK = torch.bfloat16
"""The dtype of peaks, which has the range of float32 in two bytes."""
_LARGEST = {torch.float16: 65280.0, torch.float64: torch.finfo(torch.bfloat16).max}
"""By dtype, the largest number of bfloat16 that is also in the range of the dtype."""
_LEAST = 2.0**-100
"""The smallest peak, except in float16 (see `_low`)."""
_LARGEST_BLOCK = 256
"""Largest number of numbers that are rotated together. With more, the rounding to bfloat16 when a
vector is read could move its peak to a neighboring value (see `_coarse`).
"""


@dataclass(frozen=True)
class Code:
    """Encoding of a vector's numbers.

    Attributes:
        levels: the largest code; a step is the peak divided by `levels`.
        dtype: the dtype of stored numbers.
        bound: the largest error of a number in steps, before it is rounded to the dtype of the
            model.
        group: how many numbers share a peak; None for the whole vector.
        finest: the distance of the two closest levels, in steps.
        halves: whether a byte holds two numbers, the ones at i and at i + dim / 2.
        rotated: whether vectors are rotated before they are quantized. Numbers, steps and bound are
            then those of the rotated vector.
    """

    levels: int
    dtype: torch.dtype
    bound: float
    group: int | None = None
    finest: float = 1.0
    halves: bool = False
    rotated: bool = False

    def stored(self, dim: int) -> int:
        """Return how many numbers of `dtype` a vector of `dim` numbers takes."""
        return dim // 2 if self.halves else dim

    def numbers(self, stored: int) -> int:
        """Return how many numbers a vector has if it is stored in `stored` numbers."""
        return 2 * stored if self.halves else stored

    def peaks(self, dim: int) -> int:
        """Return how many peaks a vector of `dim` numbers has."""
        return 1 if self.group is None else dim // self.group


INT8 = Code(127, torch.int8, 0.5)
INT4 = Code(7, torch.uint8, 0.5, group=32, halves=True)
ROTATED_INT4 = Code(7, torch.uint8, 0.5, halves=True, rotated=True)
FP8 = Code(448, torch.uint8, 16.0, finest=2.0**-9)
"""Floating point with 4 bits of exponent and 3 of mantissa. The error is at most a 16th of the
number, or 2^-10 of a step if that is more. Numbers are stored as bytes, because few operations
support `torch.float8_e4m3fn`.
"""


@dataclass(frozen=True)
class Format:
    """Encoding of the keys and values of quantized slots.

    Attributes:
        name: its name after a colon in a policy, `kcenter(64):int8`.
        keys, values: their codes.
    """

    name: str
    keys: Code
    values: Code

    @property
    def rotated(self) -> bool:
        """Whether keys and values are rotated."""
        return self.keys.rotated and self.values.rotated

    def unrotated(self) -> Format:
        """Return the same format, except that vectors are not rotated back when they are read."""
        keys, values = (replace(code, rotated=False) for code in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def wrong(self, key_dim: int, value_dim: int) -> str | None:
        """Return why heads of these sizes cannot have this format; None if they can."""
        for what, dim, code in (("keys", key_dim, self.keys), ("values", value_dim, self.values)):
            if code.halves and dim % 2:
                return (
                    f"{self.name} packs two numbers of {what} in a byte, so the size of heads must "
                    f"be even, got {dim}. Use int8."
                )
            if code.group is not None and dim % code.group:
                return (
                    f"{self.name} stores {what} in groups of {code.group} numbers, but heads of "
                    f"{dim} cannot be divided into such groups. Use int8."
                )
        return None


FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        Format("int8", INT8, INT8),
        Format("int4", ROTATED_INT4, ROTATED_INT4),
        Format("k8v4", INT8, INT4),
        Format("fp8", FP8, FP8),
    )
}
"""Every format by its name."""


def whole_bytes(code: Code) -> bool:
    """Return whether each number is a whole number in a byte, and a vector has one peak."""
    return code.dtype == torch.int8 and code.group is None


def quantize(x: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Quantize finite vectors x [..., dim], each number within `code.bound` steps.

    Returns the numbers [..., `code.stored(dim)`], and the peaks [..., `code.peaks(dim)`], bfloat16.
    """
    if code.rotated:
        most, high = _rotated_range(x)
        wide = _transform(x.float().clamp(-most, most)).clamp(-high, high)
        peaks = _coarse(wide.abs().amax(dim=-1, keepdim=True).clamp(_low(x.dtype, code), high))
        levels = (wide / steps(peaks, code)).clamp(-code.levels, code.levels)
        return _store(levels, code), peaks
    high = _LARGEST.get(x.dtype, torch.finfo(PEAK).max)
    wide = x.float().clamp(-high, high).unflatten(-1, (code.peaks(x.shape[-1]), -1))
    peaks = wide.abs().amax(dim=-1).clamp(_low(x.dtype, code), high).to(PEAK)
    return _store((wide / steps(peaks, code)[..., None]).flatten(-2), code), peaks


def _rotated_range(x: Tensor) -> tuple[float, float]:
    """Return limits for the numbers of a vector before rotation, and for its peak after rotation.
    They keep the numbers that are read later (codes times the matrix) within the range of the
    dtype.
    """
    most = min(torch.finfo(x.dtype).max, torch.finfo(PEAK).max)
    return most, most / math.sqrt(block_size(x.shape[-1])) * 15 / 16


def _low(dtype: torch.dtype, code: Code) -> float:
    """Return the smallest peak of vectors of a dtype."""
    if dtype != torch.float16:
        return _LEAST
    # The smallest numbers of float16 are 2^-24 apart, and must distinguish the closest levels.
    return max(2.0**-14, 2.0**-22 * code.levels / code.finest)


def quantize_into(x: Tensor, code: Code, numbers: Tensor, peaks: Tensor) -> None:
    """Quantize like `quantize`, but write into given tensors, which have the shapes and dtypes of
    its results. x has four dimensions.
    """
    write = None
    if whole_bytes(code):
        write = kernels.quantize("int8", x)
        bounds: tuple[float, ...] = _LEAST, torch.finfo(PEAK).max
    elif code.rotated:
        write = kernels.quantize("int4", x)
        most, high = _rotated_range(x)
        bounds = _LEAST, high, most, block_size(x.shape[-1])
    if write is not None:
        write(x, numbers, peaks, code.levels, *bounds)
        return
    for into, t in zip((numbers, peaks), quantize(x, code), strict=True):
        into.copy_(t)


def steps(peaks: Tensor, code: Code) -> Tensor:
    """Return the size of a step (peak / levels), for peaks of any shape, float32."""
    return peaks.float() / code.levels


def dequantize(numbers: Tensor, peaks: Tensor, code: Code, dtype: torch.dtype) -> Tensor:
    """Dequantize the results of `quantize` to vectors [..., dim] of a dtype."""
    levels = read(numbers, code)
    if code.rotated:
        # Levels are whole numbers, so the sums are exact in any order, with any kind of product.
        size = block_size(levels.shape[-1])
        levels = _by_blocks(levels, _signs(size, levels.device))
        return (levels * (steps(peaks, code) / math.sqrt(size))).to(dtype)
    if code.group is None:
        return (levels * steps(peaks, code)).to(dtype)
    levels = levels.unflatten(-1, (peaks.shape[-1], -1))
    return (levels * steps(peaks, code)[..., None]).flatten(-2).to(dtype)


def as_read(x: Tensor, code: Code) -> Tensor:
    """Quantize vectors [batch, heads, n, dim] with a code, and read them back in their dtype."""
    shape, dim = x.shape[:3], x.shape[3]
    numbers = x.new_empty((*shape, code.stored(dim)), dtype=code.dtype)
    peaks, out = x.new_empty((*shape, code.peaks(dim)), dtype=PEAK), torch.empty_like(x)
    quantize_into(x, code, numbers, peaks)
    dequantize_into(numbers, peaks, code, out)
    return out


def dequantize_into(numbers: Tensor, peaks: Tensor, code: Code, out: Tensor) -> None:
    """Dequantize like `dequantize`, but write into a given tensor of four dimensions [..., dim]."""
    read = None
    more: tuple[int, ...] = ()
    if whole_bytes(code):
        read = kernels.dequantize("int8", out)
    elif code.halves and code.group is None:
        read = kernels.dequantize("int4", out)
        more = (block_size(out.shape[-1]),) if code.rotated else ()
    if read is not None:
        read(numbers, peaks, code.levels, out, *more)
    else:
        out.copy_(dequantize(numbers, peaks, code, out.dtype))


def read(numbers: Tensor, code: Code) -> Tensor:
    """Unpack stored numbers into levels, which count steps [..., dim], float32."""
    if code.halves:
        return torch.cat([numbers & 15, numbers >> 4], dim=-1).float() - 8
    if code.dtype == torch.uint8:
        return numbers.view(torch.float8_e4m3fn).float()
    return numbers.float()


def are_levels(numbers: Tensor, code: Code) -> bool:
    """Return whether all stored numbers are valid levels."""
    return bool((read(numbers, code).abs() <= code.levels).all())


def _store(levels: Tensor, code: Code) -> Tensor:
    """Round vectors, given in steps, to levels, and pack these as they are stored."""
    if code.halves:
        low, high = (levels.round() + 8).to(torch.uint8).chunk(2, dim=-1)
        return low | high << 4
    if code.dtype == torch.uint8:
        return levels.to(torch.float8_e4m3fn).view(torch.uint8)
    return levels.round().to(code.dtype)


def block_size(dim: int) -> int:
    """Return how many adjacent numbers out of `dim` are rotated together: a power of two."""
    return min(dim & -dim, _LARGEST_BLOCK)


def hadamard(x: Tensor) -> Tensor:
    """Multiply vectors [..., dim] by the normalized Hadamard matrix of each block.

    The matrix is orthogonal and its own inverse, so rotated queries have the same products with
    rotated keys.
    """
    size = block_size(x.shape[-1])
    return _by_blocks(x, _signs(size, x.device).to(x.dtype) / math.sqrt(size))


def _by_blocks(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply each block of vectors [..., dim] by a matrix."""
    return (x.reshape(-1, matrix.shape[0]) @ matrix).view(x.shape)


def _transform(x: Tensor) -> Tensor:
    """Compute `hadamard` of float32 vectors with sums in a fixed order, so that a vector's result
    is bit-identical whatever other vectors there are.
    """
    dim = x.shape[-1]
    size = block_size(dim)
    x = x / size  # first, so that no sum is too large
    width = 1
    while width < size:
        pairs = x.unflatten(-1, (-1, 2, width))
        one, other = pairs.unbind(-2)
        x = torch.stack([one + other, one - other], dim=-2).flatten(-3)
        width *= 2
    return x * math.sqrt(size)


def _coarse(peaks: Tensor) -> Tensor:
    """Round peaks to four significant bits.

    Neighboring values differ by 1/16 to 1/8 of themselves, so a number within 1/32 of a peak is
    rounded to it. In bfloat16, each number that is read is off by 2^-9 of itself, so sums in a
    block of n numbers are off by sqrt(n) 2^-9 of the peak, which is 1/32 for 256.
    """
    mantissa, exponent = torch.frexp(peaks)
    return torch.ldexp((mantissa * 16).round() / 16, exponent).to(PEAK)


@lru_cache
def _make_signs(size: int, device: torch.device) -> Tensor:
    """Return the Hadamard matrix of ones and minus ones (Sylvester's) [size, size], float32."""
    signs = torch.ones(1, 1, device=device)
    while signs.shape[0] < size:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs


# Without this decorator, every compiled step would make the matrix again.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _signs(size: int, device: torch.device) -> Tensor:
    return _make_signs(size, device)
