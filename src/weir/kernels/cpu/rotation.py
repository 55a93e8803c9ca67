"""Rotates keys further by some positions on the CPU, like `weir.slab.positions.Rotary.move`, up to
rounding.

Turns are reduced to a fraction in float64, as there, and then to an eighth of a turn, where a short
polynomial is enough for sine and cosine. Apart from the rotated keys, only the turns of one key at
a time are written to memory. Roofline: three operations in float64 and about thirty in float32 for
each pair of numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from weir.kernels.cpu.compilation import (
    WHOLE,
    Strides,
    address_of,
    compile_kernel,
    floats_at,
    with_unit_stride,
)

_TAU = np.float32(6.283185307179586)


@njit(nogil=True)
def _rotate_one(
    key: np.ndarray, by: float, per_turn: np.ndarray, turns: np.ndarray, out: np.ndarray
) -> None:
    """Copy one key [dim] into `out` with its first numbers rotated. `turns` is scratch memory for
    one number for each pair that rotates.
    """
    half = per_turn.shape[0]
    for i in range(half):
        turn = by * per_turn[i]
        turns[i] = turn - np.floor(turn + 0.5)
    for i in range(half):
        turn = turns[i]
        # The nearest quarter, from -2 to 2, and the rest, at most an eighth of a turn.
        quarter = np.floor(np.float32(4.0) * turn + np.float32(0.5))
        a = (turn - np.float32(0.25) * quarter) * _TAU
        z = a * a
        # Cephes' polynomials, off by less than 2^-24 up to an eighth of a turn.
        sine = np.float32(-1.9515295891e-4) * z + np.float32(8.3321608736e-3)
        sine = (sine * z + np.float32(-1.6666654611e-1)) * z * a + a
        cosine = np.float32(2.443315711809948e-5) * z + np.float32(-1.388731625493765e-3)
        cosine = (cosine * z + np.float32(4.166664568298827e-2)) * z * z
        cosine = cosine - np.float32(0.5) * z + np.float32(1.0)
        which = np.int32(quarter)
        odd = (which & np.int32(1)) != 0
        s, c = (cosine, sine) if odd else (sine, cosine)
        s = -s if (which & np.int32(2)) != 0 else s
        c = -c if ((which + np.int32(1)) & np.int32(2)) != 0 else c
        one, two = key[i], key[half + i]
        out[i] = one * c - two * s
        out[half + i] = two * c + one * s
    for i in range(2 * half, key.shape[0]):
        out[i] = key[i]


def _turn(
    keys_at: int,
    steps: Strides,
    by: np.ndarray,
    per_turn: np.ndarray,
    dim: int,
    out_at: int,
    out_steps: Strides,
) -> None:
    batch, heads, count = by.shape
    keys, out = floats_at(keys_at, WHOLE)[0], floats_at(out_at, WHOLE)[0]
    turns = np.empty(per_turn.shape[0], np.float32)
    for row in range(batch):
        for head in range(heads):
            at = row * steps[0] + head * steps[1]
            to = row * out_steps[0] + head * out_steps[1]
            for place in range(count):
                _rotate_one(
                    keys[at : at + dim],
                    float(by[row, head, place]),
                    per_turn,
                    turns,
                    out[to : to + dim],
                )
                at += steps[2]
                to += out_steps[2]


_compiled_turn = compile_kernel(_turn, fastmath=("contract",))


def rotate_keys(keys: Tensor, by: Tensor, per_turn: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotate keys, which are already rotated, by more positions.

    Args:
        keys: [batch, heads, n, dim], float32.
        by: number of positions [batch or 1, heads or 1, n], int64.
        per_turn: turns per position of each pair (i, i + half) of the first numbers of a key
            [half], float64.
        out: memory for the result, in the shape of `keys`; None for new memory.

    Raises:
        WeirError: the last dimension of `out` is not contiguous.
    """
    out = torch.empty_like(keys, memory_format=torch.contiguous_format) if out is None else out
    if keys.numel():
        every = by.expand(keys.shape[:3]).contiguous().numpy()
        keys, lines = with_unit_stride(keys), with_unit_stride(out, writable=True)
        where = *address_of(keys), every, per_turn.numpy(), keys.shape[3]
        _compiled_turn(*where, *address_of(lines))
    return out
