"""Attention of one query a head over slots of which the first are in 8 bits, on a CPU.

Numbers are widened in registers, and the steps go into logits and weights: <q, c> * step and
p * step. So keys and values are read once, as they lie, and no copy of them is made. Sums are
float32. One pass has the logits of all slots, one their exponentials, one the weighted values.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weir.kernels.numba_tools import compiled

_LOG2E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST = np.float32(-87.0)


def _attend(
    queries: np.ndarray,
    codes: np.ndarray,
    steps: np.ndarray,
    keys: np.ndarray,
    mask: np.ndarray,
    value_codes: np.ndarray,
    value_steps: np.ndarray,
    values: np.ndarray,
    first: int,
    stop: int,
    out: np.ndarray,
) -> None:
    """Answers [heads, group, value_dim] into `out`; see `decode`."""
    heads, group, dim = queries.shape
    coded = codes.shape[1]
    width = values.shape[2]
    exact = stop - coded
    count = coded - first + exact
    logits = np.empty((group, count), np.float32)
    power = np.empty(count, np.int32)
    scaled = power.view(np.float32)
    wide = np.empty(max(dim, width), np.float32)
    for head in range(heads):
        for slot in range(first, coded):
            code = codes[head, slot]
            for i in range(dim):
                wide[i] = np.float32(code[i])
            for member in range(group):
                query = queries[head, member]
                total = np.float32(0.0)
                for i in range(dim):
                    total += query[i] * wide[i]
                logits[member, slot - first] = total * steps[head, slot]
        for slot in range(exact):
            key = keys[head, slot]
            for member in range(group):
                query = queries[head, member]
                total = np.float32(0.0)
                for i in range(dim):
                    total += query[i] * key[i]
                logits[member, coded - first + slot] = total
        for member in range(group):
            row = logits[member]
            if mask.shape[0]:
                for slot in range(count):
                    row[slot] += mask[head, first + slot]
            top = row[0]
            for slot in range(count):
                top = max(top, row[slot])
            if top == -np.inf:
                top = np.float32(0.0)
            total = np.float32(0.0)
            for slot in range(count):
                # e^x = 2^n e^f, with f in half an octave of 0; the polynomial is Cephes'.
                x = max(row[slot] - top, _LEAST)
                n = np.floor(x * _LOG2E + np.float32(0.5))
                f = x - n * _LN2_HIGH - n * _LN2_LOW
                p = np.float32(1.9875691500e-4)
                p = p * f + np.float32(1.3981999507e-3)
                p = p * f + np.float32(8.3334519073e-3)
                p = p * f + np.float32(4.1665795894e-2)
                p = p * f + np.float32(1.6666665459e-1)
                p = p * f + np.float32(5.0000001201e-1)
                row[slot] = (p * f * f + f + np.float32(1.0)) if x > _LEAST else np.float32(0.0)
                power[slot] = (np.int32(n) + np.int32(127)) << np.int32(23)
            for slot in range(count):
                row[slot] *= scaled[slot]
                total += row[slot]
            share = np.float32(1.0) / total if total > 0 else np.float32(0.0)
            for slot in range(count):
                row[slot] *= share
            for slot in range(first, coded):
                row[slot - first] *= value_steps[head, slot]
        out[head] = 0.0
        for slot in range(first, coded):
            code = value_codes[head, slot]
            for i in range(width):
                wide[i] = np.float32(code[i])
            for member in range(group):
                weight = logits[member, slot - first]
                answer = out[head, member]
                for i in range(width):
                    answer[i] += weight * wide[i]
        for slot in range(exact):
            value = values[head, slot]
            for member in range(group):
                weight = logits[member, coded - first + slot]
                answer = out[head, member]
                for i in range(width):
                    answer[i] += weight * value[i]


_run = compiled(_attend, fastmath=("reassoc", "contract", "nsz"))
# What LLVM may do to add in parallel; infinities keep their meaning.


def decode8(
    queries: Tensor,
    coded: tuple[Tensor, Tensor, Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int],
) -> Tensor:
    """The answers [batch, kv_heads, group, 1, value_dim]; zero for a query that sees nothing.

    Args:
        queries: [batch, kv_heads, group, 1, key_dim].
        coded: whole numbers [batch, kv_heads, coded, dim], int8, and steps
            [batch, kv_heads, coded], float32, of keys and then of values.
        keys, values: of the exact slots behind them [batch, kv_heads, slots, dim].
        mask: log-weights of all slots, the same in both sums, -inf where a query must not look
            [batch, kv_heads, slots], float32; None where all are 0.
        scale: factor of the logits.
        slots: of all slots, from the first that is read to behind the last.
    """
    batch, kv_heads, group = queries.shape[:3]
    exact = slots[1] - coded[0].shape[2]

    def flat(t: Tensor) -> np.ndarray:
        return t.reshape(batch * kv_heads, *t.shape[2:]).numpy()

    asked = flat((queries.float() * scale)[:, :, :, 0])
    out = torch.empty(batch, kv_heads, group, 1, values.shape[3])
    _run(
        asked,
        *map(flat, coded[:2]),
        flat(keys[:, :, :exact].float().contiguous()),
        np.empty((0, 0), np.float32) if mask is None else flat(mask.contiguous()),
        *map(flat, coded[2:]),
        flat(values[:, :, :exact].float().contiguous()),
        *slots,
        out.view(batch * kv_heads, group, -1).numpy(),
    )
    return out.to(values.dtype)
