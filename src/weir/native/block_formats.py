"""The memory layout of weights in blocks that kernels multiply, for each type of a GGUF file.

A *block* is 32 numbers of one output, and a *panel* is 16 outputs, whose blocks are interleaved.
A weight is stored in two arrays:

- `codes`, uint8 [panels, blocks, 64 * bits]. Four consecutive numbers are a *quad*. A block has
  eight quads, the groups 0 to 7. A vector of 64 bytes holds one quad of each output. Codes of 8
  bits are eight such vectors. Codes of fewer bits are cut into *planes* of 4, 2 or 1 bits, lowest
  bits first, so that a byte of a plane has bits of 2, 4 or 8 groups. `place_of` computes where the
  bits of each group are.
- `scales`, uint8 [panels, units, bytes]. A unit is one block, or eight blocks that share a scale as
  in ggml's K types. It has 16 scales in float16, then 16 minima in float16 if there are minima. If
  blocks share scales, factors follow, for every block or for each half of a block: 16 signed
  numbers of 8 bits for scales, then 16 unsigned ones for minima if there are minima.

A number is `(value - zero) * scale + minimum`. `value` is the code, or its entry in a table. If
blocks share scales, a number is `(value - zero) * factor * power * scale`, minus the minimum times
its factor, where `power` is `BlockFormat.unit`, a constant of the type.

Numbers of 16 bits, F16 and BF16, are also stored in such panels, without scales: for each block,
first the first number of all outputs, then the second, and so on.

Format: the types of the ggml project. Numbers have exactly the values that the file gives them:
nothing is rounded.
"""

from __future__ import annotations

from typing import NamedTuple

BLOCK, PANEL = 32, 16
"""Numbers in a block, and outputs in a panel."""
SHARED = 8
"""Blocks that share a scale in ggml's K types."""
QUADS = BLOCK // 4


class BlockFormat(NamedTuple):
    """The layout of a weight in blocks.

    Attributes:
        planes: bits of each plane of codes; a single 8 for whole bytes, a single 16 for numbers of
            16 bits.
        zero: the value that stands for 0.
        minima: blocks have a minimum, which is added to their numbers, or subtracted if it is
            shared.
        shared: eight blocks share a scale, and each has a factor of it.
        halves: each half of a block has a separate factor.
        unit: a power of two by which factors are multiplied; not a unit of `scales`.
        table: the value of each code; empty if codes are the values themselves.
        number: "half" or "bfloat" for numbers of 16 bits, which need no scale.
    """

    planes: tuple[int, ...]
    zero: int = 0
    minima: bool = False
    shared: bool = False
    halves: bool = False
    unit: float = 1.0
    table: tuple[int, ...] = ()
    number: str = ""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return sum(self.planes)

    @property
    def per(self) -> int:
        """How many numbers share a scale, or a factor if blocks share scales."""
        return BLOCK // 2 if self.halves else BLOCK

    @property
    def values(self) -> tuple[int, ...]:
        """The value of each code."""
        return self.table or tuple(range(1 << self.bits))

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of one block of a panel."""
        return self.bits * BLOCK * PANEL // 8

    @property
    def unit_blocks(self) -> int:
        """Number of blocks in a unit of scales."""
        return SHARED if self.shared else 1

    @property
    def heads(self) -> int:
        """How many scales and minima in float16 a unit has for each output: 1 without minima, 2
        with minima, and 0 for numbers of 16 bits.
        """
        return 0 if self.number else 2 if self.minima else 1

    @property
    def factors(self) -> int:
        """How many factors of 8 bits a block has for each output; 0 if blocks share no scales."""
        return self.heads * (2 if self.halves else 1) if self.shared else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of a unit of scales."""
        return PANEL * (2 * self.heads + self.unit_blocks * self.factors)

    @property
    def bits_per_number(self) -> float:
        """Bits that a number takes, including its share of scales."""
        scales = self.scale_bytes / self.unit_blocks
        return 8 * (self.code_bytes + scales) / (BLOCK * PANEL)

    def place_of(self, plane: int, group: int) -> tuple[int, int]:
        """Return which vector of a plane has the bits of a group's codes, and by how many bits they
        are shifted.

        If each half of a block has a separate factor, the groups of a half are stored together.
        Otherwise, the first groups have the lowest bits of all vectors, as in files.
        """
        bits = self.planes[plane]
        if self.halves:
            return group * bits // 8, group * bits % 8
        return group % bits, group // bits * bits


_IQ4 = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
_E2M1 = 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12


def _signs(*values: int) -> tuple[int, ...]:
    """Return values with both signs, in order."""
    return (*(-value for value in reversed(values)), *values)


_IQ3_XXS, _IQ3_S = _signs(4, 12, 20, 28, 36, 44, 52, 62), _signs(*range(1, 16, 2))
# `_IQ2` has eight entries, so that the code of -x is the code of x with all bits inverted; the two
# zeros are not used.
_IQ2, _IQ1 = _signs(8, 25, 43, 0), _signs(1, 7, 9)


def _by_table(
    planes: tuple[int, ...],
    values: tuple[int, ...],
    shared: bool = False,
    halves: bool = False,
    unit: float = 1.0,
) -> BlockFormat:
    """Make a format whose codes stand for signed values; its table has them with 128 added."""
    table = tuple(value + 128 for value in values)
    return BlockFormat(planes, 128, False, shared, halves, unit, table)


BLOCK_TYPES: dict[str, BlockFormat] = {
    "Q8_0": BlockFormat((8,), zero=128),
    "Q4_0": BlockFormat((4,), zero=8),
    "Q4_1": BlockFormat((4,), minima=True),
    "Q5_0": BlockFormat((4, 1), zero=16),
    "Q5_1": BlockFormat((4, 1), minima=True),
    "Q2_K": BlockFormat((2,), minima=True, shared=True, halves=True),
    "Q3_K": BlockFormat((2, 1), zero=4, shared=True, halves=True),
    "Q4_K": BlockFormat((4,), minima=True, shared=True),
    "Q5_K": BlockFormat((4, 1), minima=True, shared=True),
    "Q6_K": BlockFormat((4, 2), zero=32, shared=True, halves=True),
    "IQ4_NL": _by_table((4,), _IQ4),
    "IQ4_XS": _by_table((4,), _IQ4, shared=True),
    "IQ3_XXS": _by_table((4,), _IQ3_XXS, shared=True, unit=0.25),
    "IQ3_S": _by_table((4,), _IQ3_S, shared=True),
    "IQ2_XXS": _by_table((2, 1), _IQ2, shared=True, unit=0.125),
    "IQ2_XS": _by_table((2, 1), _IQ2, shared=True, halves=True, unit=0.125),
    "IQ2_S": _by_table((2, 1), _IQ2, shared=True, halves=True, unit=0.125),
    "IQ1_S": _by_table((2, 1), _IQ1, shared=True, unit=0.125),
    "IQ1_M": _by_table((2, 1), _IQ1, shared=True, halves=True, unit=0.125),
    "TQ1_0": BlockFormat((2,), zero=1, shared=True),
    "TQ2_0": BlockFormat((2,), zero=1, shared=True),
    "MXFP4": _by_table((4,), _E2M1),
    "F16": BlockFormat((16,), number="half"),
    "BF16": BlockFormat((16,), number="bfloat"),
}
"""The format of each supported type of a GGUF file, by the name of the type."""
