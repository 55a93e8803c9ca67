"""Dequantizes rows of a weight in blocks on the CPU, for look-ups in an embedding.

A step looks up one row. In PyTorch, that takes about thirty operations of a few microseconds each,
and more after a step has streamed all weights through the processor's caches. One loop serves all
types, with a short table that describes the type. `weir.native.block_weights.write_out` is the
readable reference, and both give bit-identical numbers.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from weir.kernels.cpu.compilation import (
    WHOLE,
    bytes_at,
    compile_callback,
    compile_kernel,
    doubles_at,
    floats_at,
    longs_at,
    shorts_at,
    ubytes_at,
)
from weir.kernels.cpu.vectors import FLOAT, as_float
from weir.native.block_formats import BLOCK, BLOCK_TYPES, PANEL, QUADS
from weir.native.kernels.linear_blocks import SUPPORTED as BLOCKS_SUPPORTED

SUPPORTED = BLOCKS_SUPPORTED
"""Whether this processor supports products with blocks. If so, it can also convert float16."""
_NUMBERS = {"": 0, "half": 1, "bfloat": 2}


@intrinsic
def _half(_typing: Any, bits: Any) -> Any:
    """Convert the bits of a float16 to float32."""

    def write(_context: Any, builder: ir.IRBuilder, _signature: Any, given: Any) -> Any:
        return builder.fpext(builder.bitcast(given[0], ir.HalfType()), FLOAT)

    return types.float32(types.int16), write


@njit(nogil=True)
def _code(places: np.ndarray, planes: int, block: int, lane: int, group: int, number: int) -> int:
    """Read one code of the block at the address `block`.

    Args:
        places: the bits of each plane, and the place of each group in it (`_form_of`).
        planes: number of planes.
        block: address of the codes of one block of a panel.
        lane: the output, 0 to 15.
        group, number: the group (a quad of the block), and the code in it, 0 to 3.
    """
    code, below = 0, 0
    for plane in range(planes):
        at = plane * (1 + 2 * QUADS)
        bits, place = places[at], at + 1 + 2 * group
        byte = np.int64(ubytes_at(block + places[place] + 4 * lane, WHOLE)[0, number])
        code |= ((byte >> places[place + 1]) & ((1 << bits) - 1)) << below
        below += bits
    return code


def _read_rows(
    which: int,
    rows: int,
    outputs: int,
    blocks: int,
    units: int,
    codes: int,
    scales: int,
    form: int,
    table: int,
    unit: float,
    out: int,
) -> bool:
    """Dequantize rows. Returns False and writes nothing if a row does not exist.

    Args:
        which: address of the numbers of the rows, int64 [rows].
        rows, outputs: number of rows to read, and of rows in the weight.
        blocks, units: blocks and units of scales in a row of the weight.
        codes, scales: addresses of the weight's codes and scales (`native.block_formats`).
        form: address of the description of the type (`_form_of`).
        table: address of the value of each code, or 0 where codes are values.
        unit: `BlockFormat.unit`, by which factors are multiplied.
        out: address of float32 [rows, 32 * blocks].
    """
    numbers, lines = longs_at(which, (1, rows))[0], floats_at(out, (rows, BLOCK * blocks))
    for row in range(rows):
        if numbers[row] < 0 or numbers[row] >= outputs:
            return False
    n, worth = longs_at(form, WHOLE)[0], np.float32(unit)
    stored, heads, factors, unit_blocks = n[0], n[1], n[2], n[3]
    code_bytes, scale_bytes, zero, planes = n[4], n[5], np.float32(n[6]), n[7]
    places = longs_at(form + 64, WHOLE)[0]
    scopes = 1 if factors <= heads else 2
    per = BLOCK // scopes
    for row in range(rows):
        panel, lane = numbers[row] // PANEL, numbers[row] % PANEL
        line = lines[row]
        for block in range(blocks):
            at = codes + (panel * blocks + block) * code_bytes
            if stored:
                found = shorts_at(at + 2 * lane, WHOLE)[0]
                for i in range(BLOCK):
                    bits = found[PANEL * i]
                    line[BLOCK * block + i] = _half(bits) if stored == 1 else as_float(bits)
                continue
            own = scales + (panel * units + block // unit_blocks) * scale_bytes
            for scope in range(scopes):
                halves = shorts_at(own + 2 * lane, WHOLE)[0]
                scale, least = _half(halves[0]), np.float32(0.0)
                if heads == 2:
                    least = _half(halves[PANEL])
                if factors:
                    first = (block % unit_blocks) * factors + scope * heads
                    beside = own + 2 * heads * PANEL + first * PANEL + lane
                    factor = np.float32(bytes_at(beside, WHOLE)[0, 0])
                    scale = scale * (factor * worth)
                    if heads == 2:
                        least = -(least * np.float32(ubytes_at(beside + PANEL, WHOLE)[0, 0]))
                for i in range(scope * per, scope * per + per):
                    code = _code(places, planes, at, lane, i // 4, i % 4)
                    if table:
                        code = np.int64(ubytes_at(table, WHOLE)[0, code])
                    number = (np.float32(code) - zero) * scale
                    if heads == 2:
                        number += least
                    line[BLOCK * block + i] = number
    return True


_compiled_read = compile_kernel(_read_rows)


def _look_up(address: int) -> None:
    """Call `_read_rows` with arguments that are in memory as integers; `unit` is given by its
    address.

    If a row does not exist, all rows become NaN.
    """
    n = longs_at(address, (1, 11))[0]
    sizes, weight = (n[1], n[2], n[3], n[4]), (n[5], n[6], n[7], n[8])
    unit = doubles_at(n[9], (1, 1))[0, 0]
    if not _compiled_read(n[0], *sizes, *weight, unit, n[10]):
        floats_at(n[10], (1, n[1] * BLOCK * n[3]))[0, :] = np.float32(np.nan)


def block_reader(which: np.ndarray, blocks: Any, out: Tensor) -> tuple[int, np.ndarray, list[Any]]:
    """Describe how a step table looks up rows, with the same memory in every step.

    Args:
        which: the numbers of the rows, int64 [rows].
        blocks: a weight, with `codes`, `scales`, `kind` and `outputs`.
        out: float32 [rows, inputs].

    Returns:
        The address of a function, the array whose address is its argument, and the objects that
        must stay in memory while it is used.
    """
    form, table, unit = _form_of(blocks.kind)
    factor = np.array([unit], np.float64)
    sizes = len(which), blocks.outputs, blocks.codes.shape[1], blocks.scales.shape[1]
    memory = blocks.codes.data_ptr(), blocks.scales.data_ptr()
    known = form.ctypes.data, 0 if table is None else table.ctypes.data, factor.ctypes.data
    numbers = which.ctypes.data, *sizes, *memory, *known, out.data_ptr()
    held = [form, table, factor, which, blocks.codes, blocks.scales, out]
    return _look_up_at(), np.array(numbers, np.int64), held


@lru_cache
def _look_up_at() -> int:
    address: int = compile_callback(_look_up).address
    return address


@lru_cache
def _form_of(kind: str) -> tuple[np.ndarray, np.ndarray | None, float]:
    """Return the description of a type for `_read_rows`.

    It has three parts: sizes, with the bits of each plane and the place of each group in it; the
    values of codes, or None if codes are values; and `BlockFormat.unit`.
    """
    form = BLOCK_TYPES[kind]
    sizes = [_NUMBERS[form.number], form.heads, form.factors, form.unit_blocks]
    sizes += [form.code_bytes, form.scale_bytes, form.zero, len(form.planes)]
    before = 0
    for plane, bits in enumerate(form.planes if not form.number else ()):
        sizes.append(bits)
        for group in range(QUADS):
            vector, up = form.place_of(plane, group)
            sizes += [4 * PANEL * (before + vector), up]
        before += bits
    table = np.array(form.table, np.uint8) if form.table else None
    return np.array(sizes, np.int64), table, form.unit


def block_rows(
    which: Tensor, codes: Tensor, scales: Tensor, outputs: int, kind: str
) -> Tensor | None:
    """Return rows of a weight in float32 [rows, inputs]; None if a row does not exist.

    Args:
        which: the numbers of the rows, int64 [rows].
        codes, scales: of the weight, contiguous.
        outputs: number of outputs of the weight; `codes` has more if it is not a multiple of 16.
        kind: the type of the blocks.
    """
    form, table, unit = _form_of(kind)
    which, (_, blocks, _) = which.contiguous(), codes.shape
    out = torch.empty(len(which), BLOCK * blocks)
    weight = outputs, blocks, scales.shape[1], codes.data_ptr(), scales.data_ptr()
    known = form.ctypes.data, 0 if table is None else table.ctypes.data, unit
    return (
        out
        if _compiled_read(which.data_ptr(), len(which), *weight, *known, out.data_ptr())
        else None
    )
