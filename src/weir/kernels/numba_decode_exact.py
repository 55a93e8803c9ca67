"""Attention of one query a head over exact slots, on a CPU.

PyTorch's fused attention is made for many queries. With one, it takes several times as long as it
takes to read keys and values. Here each is read once, for all query heads that share it, four slots
at a time that lie far from each other: processors fetch ahead what is read in order, and several
such streams come faster than one. Sums are float32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weir.kernels.numba_softmax import ATTENTION_MATH, softmax
from weir.kernels.numba_tools import compiled

_NO_FLOATS = np.empty((0, 0, 0, 0), np.float32)
_NO_HALVES = np.empty((0, 0, 0, 0), np.int16)
_NO_MASK = np.empty((0, 0, 0), np.float32)


def _widen(halves: np.ndarray, bits: np.ndarray) -> None:
    """Numbers in bfloat16, which are the upper halves of those in float32."""
    for i in range(halves.shape[0]):
        bits[i] = np.int32(halves[i]) << 16


_widen_one = compiled(_widen)


def _attend(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    half_keys: np.ndarray,
    half_values: np.ndarray,
    mask: np.ndarray,
    scale: np.float32,
    first: int,
    stop: int,
    out: np.ndarray,
) -> None:
    """Answers [batch, heads, group, 1, value_dim] into `out`; see `decode_exact`.

    Keys and values come as float32 or as the bits of bfloat16; the others are of no row.
    """
    batch, heads, group, _, dim = queries.shape
    width = out.shape[4]
    halves = half_keys.shape[0] > 0
    count = stop - first
    part = count // 4
    logits = np.empty((group, count), np.float32)
    power = np.empty(count, np.int32)
    bits = np.empty((4, max(dim, width)), np.int32)
    wide = bits.view(np.float32)
    asked = np.empty((group, dim), np.float32)
    for both in range(batch * heads):
        line, head = both // heads, both % heads
        for member in range(group):
            query, factors = queries[line, head, member, 0], asked[member]
            for i in range(dim):
                factors[i] = query[i] * scale
        for place in range(part + count % 4):
            # The last few, where four does not divide them, are one slot four times.
            at, step = (place, part) if place < part else (place + 3 * part, 0)
            slot = first + at
            if halves:
                for i in range(4):
                    _widen_one(half_keys[line, head, slot + i * step], bits[i])
                a, b, c, d = wide[0], wide[1], wide[2], wide[3]
            else:
                a, b = keys[line, head, slot], keys[line, head, slot + step]
                c, d = keys[line, head, slot + 2 * step], keys[line, head, slot + 3 * step]
            for member in range(group):
                query, row = asked[member], logits[member]
                p = q = r = s = np.float32(0.0)
                for i in range(dim):
                    p += query[i] * a[i]
                    q += query[i] * b[i]
                    r += query[i] * c[i]
                    s += query[i] * d[i]
                row[at], row[at + step], row[at + 2 * step], row[at + 3 * step] = p, q, r, s
        for member in range(group):
            row = logits[member]
            if mask.shape[0]:
                for place in range(count):
                    row[place] += mask[line, head, first + place]
            softmax(row, power)
        out[line, head] = 0.0
        for place in range(part + count % 4):
            at, step = (place, part) if place < part else (place + 3 * part, 0)
            slot = first + at
            if halves:
                for i in range(4):
                    _widen_one(half_values[line, head, slot + i * step], bits[i])
                a, b, c, d = wide[0], wide[1], wide[2], wide[3]
            else:
                a, b = values[line, head, slot], values[line, head, slot + step]
                c, d = values[line, head, slot + 2 * step], values[line, head, slot + 3 * step]
            for member in range(group):
                row, answer = logits[member], out[line, head, member, 0]
                p, q, r, s = row[at], row[at + step], row[at + 2 * step], row[at + 3 * step]
                if step == 0:
                    q = r = s = np.float32(0.0)
                for i in range(width):
                    answer[i] += p * a[i] + q * b[i] + r * c[i] + s * d[i]


_run = compiled(_attend, fastmath=ATTENTION_MATH)


def decode_exact(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    slots: tuple[int, int],
) -> Tensor:
    """The answers [batch, kv_heads, group, 1, value_dim]; zero for a query that sees nothing.

    Args:
        queries: [batch, kv_heads, group, 1, key_dim].
        keys, values: [batch, kv_heads, slots, dim], float32 or bfloat16, contiguous.
        mask: log-weights of slots, the same in both sums, -inf where a query must not look
            [batch, kv_heads, slots], float32; None where all are 0.
        scale: factor of the logits.
        slots: the first that is read, and behind the last.
    """
    if keys.dtype == torch.bfloat16:
        halves = (keys.view(torch.int16).numpy(), values.view(torch.int16).numpy())
        read = (_NO_FLOATS, _NO_FLOATS, *halves)
    else:
        read = (keys.numpy(), values.numpy(), _NO_HALVES, _NO_HALVES)
    weights = _NO_MASK if mask is None else mask.contiguous().numpy()
    asked = queries.detach().float().contiguous().numpy()
    out = np.empty((*queries.shape[:4], values.shape[3]), np.float32)
    _run(asked, *read, weights, np.float32(scale), *slots, out)
    return torch.from_numpy(out).to(values.dtype)
