"""Keys and values in 8 bits or 4: what is quantised, by how much it may be off, and back.

A vector x of a slot is written as whole numbers c and the largest number of the vector, its *peak*:

    step = peak / levels,  c = round(x / step),  read as c * step

Quantising is a projection: what was read is quantised to the same numbers again, bit for bit, in
every dtype. So pools are handed keys and values as they are read, return what stays, and however
often a slot is packed anew, nothing is lost but what was lost the first time. What makes it so: the
peak is rounded to bfloat16 before it is used, and the largest number of a vector is always the last
level, so that the peak of what was read is that peak again.

Nothing here knows about slabs or attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PEAK = torch.bfloat16
"""The dtype of peaks: any number a model makes, in two bytes."""
_LEAST = {torch.float16: 2.0**-14}
_LARGEST = {torch.float16: 65280.0, torch.float64: torch.finfo(torch.bfloat16).max}
"""The largest number of bfloat16 that the dtype has too."""


@dataclass(frozen=True)
class Code:
    """How the numbers of a vector are written.

    Attributes:
        levels: the largest whole number; a step is a `levels`-th of the peak.
        dtype: of what is stored.
        bound: by how many steps a number may be off when it is read, before it is rounded to the
            dtype of the model.
    """

    levels: int
    dtype: torch.dtype
    bound: float

    def stored(self, dim: int) -> int:
        """How many numbers of `dtype` a vector of `dim` numbers takes."""
        return dim

    def peaks(self, dim: int) -> int:
        """How many peaks it has."""
        return 1


INT8 = Code(127, torch.int8, 0.5)


@dataclass(frozen=True)
class Format:
    """How the keys and the values of quantised slots are written.

    Attributes:
        name: as it stands in a policy behind a colon, `kcenter(64):int8`.
        keys, values: their codes.
        about: what it is, in a line.
    """

    name: str
    keys: Code
    values: Code
    about: str


FORMATS: Mapping[str, Format] = {
    it.name: it for it in (Format("int8", INT8, INT8, "keys and values in 8 bits"),)
}
"""Every format by its name."""


def quantise(x: Tensor, code: Code) -> tuple[Tensor, Tensor]:
    """Vectors as whole numbers, each within `code.bound` steps.

    Args:
        x: finite numbers [..., dim].
        code: how they are to be written.

    Returns:
        The numbers [..., `code.stored(dim)`], and the peaks [..., `code.peaks(dim)`], bfloat16.
    """
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    low = _LEAST.get(x.dtype, 2.0**-100)
    high = _LARGEST.get(x.dtype, torch.finfo(PEAK).max)
    peaks = largest.clamp(low, high).to(PEAK)
    return _written(wide / steps(peaks, code), code), peaks


def steps(peaks: Tensor, code: Code) -> Tensor:
    """How far two neighbouring levels are apart, of peaks of any shape, float32."""
    return peaks.float() / code.levels


def dequantise(numbers: Tensor, peaks: Tensor, code: Code, dtype: torch.dtype) -> Tensor:
    """Vectors as they are read, [..., dim] of a dtype; arguments as `quantise` returns them."""
    return (read(numbers, code) * steps(peaks, code)).to(dtype)


def read(numbers: Tensor, code: Code) -> Tensor:
    """What is stored, as whole numbers [..., dim] in float32."""
    return numbers.float()


def are_levels(numbers: Tensor, code: Code) -> bool:
    """Whether all that is stored could have been written."""
    levels = read(numbers, code)
    return bool((levels.abs() <= code.levels).all())


def _written(levels: Tensor, code: Code) -> Tensor:
    """Numbers of steps, rounded to those there are and stored."""
    return levels.round_().to(code.dtype)
