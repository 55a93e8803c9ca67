"""Attention of one query a head over exact slots, on a CPU.

PyTorch's fused attention is made for many queries. With one, it takes several times as long as it
takes to read keys and values. Here each is read once, for three query heads that share it, whose
sums stay in registers (`slot_products`). Sums are float32.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn import functional as F

from weir.kernels.cpu.compilation import compiled
from weir.kernels.cpu.slot_products import STREAMS, VECTORS, dots, sums
from weir.kernels.cpu.softmax import ATTENTION_MATH, softmax
from weir.kernels.cpu.vectors import lanes

_NO_MASK = np.empty((0, 0, 0), np.float32)
_MEMBERS = 3
"""Query heads that are served at once."""
_LEAST = 8 * VECTORS
"""Numbers of a head from which on vectors fit into it."""


@njit(nogil=True)
def asked_as_read(query: np.ndarray, scale: np.float32, lanes: int, row: np.ndarray) -> None:
    """A query as `dots` reads it: of its last numbers a whole vector, without those before."""
    dim = query.shape[0]
    row[:] = 0.0
    for i in range(dim // lanes * lanes):
        row[i] = query[i] * scale
    for i in range(dim // lanes * lanes, dim):
        row[row.shape[0] - dim + i] = query[i] * scale


@njit(nogil=True)
def _dots(
    asked: int,
    keys: np.ndarray,
    start: int,
    step: int,
    dim: int,
    found: int,
    count: int,
    lanes: int,
    few: int,
) -> None:
    """`dots`, whose last two are constants."""
    if lanes == 16:
        if few == 3:
            dots(asked, keys, start, step, dim, found, count, 16, 3)
        elif few == 2:
            dots(asked, keys, start, step, dim, found, count, 16, 2)
        else:
            dots(asked, keys, start, step, dim, found, count, 16, 1)
    elif few == 3:
        dots(asked, keys, start, step, dim, found, count, 8, 3)
    elif few == 2:
        dots(asked, keys, start, step, dim, found, count, 8, 2)
    else:
        dots(asked, keys, start, step, dim, found, count, 8, 1)


@njit(nogil=True)
def _sums(
    shares: int,
    count: int,
    values: np.ndarray,
    start: int,
    width: int,
    answers: int,
    lanes: int,
    few: int,
) -> None:
    """`sums`, whose last two are constants."""
    if lanes == 16:
        if few == 3:
            sums(shares, count, values, start, width, answers, 16, 3)
        elif few == 2:
            sums(shares, count, values, start, width, answers, 16, 2)
        else:
            sums(shares, count, values, start, width, answers, 16, 1)
    elif few == 3:
        sums(shares, count, values, start, width, answers, 8, 3)
    elif few == 2:
        sums(shares, count, values, start, width, answers, 8, 2)
    else:
        sums(shares, count, values, start, width, answers, 8, 1)


@njit(nogil=True)
def all_dots(
    asked: np.ndarray,
    keys: np.ndarray,
    start: int,
    dim: int,
    logits: np.ndarray,
    place: int,
    number: int,
    lanes: int,
) -> None:
    """Logits of so many slots into those [group, count], from `place` on.

    Args:
        asked: queries as `asked_as_read` has them [group, dim as a multiple of lanes].
        keys: an array of slots, of which `start` is the first that is read.
        dim: of a key.
        logits: what is written.
        place, number: which of them.
        lanes: numbers of a vector, 8 or 16.
    """
    group, count = logits.shape
    part = number // STREAMS
    for slot in range(part + number % STREAMS):
        # The last few, where four does not divide them, are one slot four times.
        at, step = (slot, part) if slot < part else (slot + (STREAMS - 1) * part, 0)
        for member in range(0, group, _MEMBERS):
            few = min(_MEMBERS, group - member)
            given, found = asked[member:].ctypes.data, logits[member:, place + at :].ctypes.data
            _dots(given, keys, (start + at) * dim, step, dim, found, count, lanes, few)


@njit(nogil=True)
def all_sums(
    shares: np.ndarray, values: np.ndarray, start: int, out: np.ndarray, lanes: int
) -> None:
    """Answers [group, value_dim] of slots with shares [group, slots].

    Args:
        shares: contiguous.
        values: an array of slots, of which `start` is the first that is read.
        out: what is written; contiguous.
        lanes: numbers of a vector, 8 or 16; `lanes * VECTORS` is no more than value_dim.
    """
    (group, count), width = shares.shape, out.shape[1]
    for member in range(0, group, _MEMBERS):
        few = min(_MEMBERS, group - member)
        weights, answers = shares[member:].ctypes.data, out[member:]
        for more in range(0, width, lanes * VECTORS):
            column = min(more, width - lanes * VECTORS)
            answer = answers[:, column:].ctypes.data
            _sums(weights, count, values, start * width + column, width, answer, lanes, few)


def _attend(
    lanes: int,
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    mask: np.ndarray,
    scale: np.float32,
    first: int,
    stop: int,
    out: np.ndarray,
) -> None:
    """Answers [batch, heads, group, 1, value_dim] into `out`; see `decode_exact`."""
    batch, heads, group, _, dim = queries.shape
    slots = keys.shape[2]
    count, padded = stop - first, (dim + lanes - 1) // lanes * lanes
    logits = np.empty((group, count), np.float32)
    power = np.empty(count, np.int32)
    asked = np.empty((group, padded), np.float32)
    for both in range(batch * heads):
        line, head = both // heads, both % heads
        for member in range(group):
            asked_as_read(queries[line, head, member, 0], scale, lanes, asked[member])
        start = both * slots + first
        all_dots(asked, keys, start, dim, logits, 0, count, lanes)
        for member in range(group):
            row = logits[member]
            if mask.shape[0]:
                for place in range(count):
                    row[place] += mask[line, head, first + place]
            softmax(row, power)
        all_sums(logits, values, start, out[line, head, :, 0], lanes)


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
    width = values.shape[3]
    if min(keys.shape[3], width) < _LEAST:  # heads of toys, which are made wide enough
        queries, keys, values = (_wide(each) for each in (queries, keys, values))
    widest = lanes() if values.shape[3] >= lanes() * VECTORS else 8
    read = [each.contiguous() for each in (keys, values)]
    if keys.dtype == torch.bfloat16:
        read = [each.view(torch.int16) for each in read]
    weights = _NO_MASK if mask is None else mask.contiguous().numpy()
    asked = queries.detach().float().contiguous().numpy()
    out = np.empty((*queries.shape[:4], values.shape[3]), np.float32)
    _run(widest, asked, *(each.numpy() for each in read), weights, np.float32(scale), *slots, out)
    return torch.from_numpy(out)[..., :width].to(values.dtype).contiguous()


def _wide(t: Tensor) -> Tensor:
    """With zeros behind its last numbers."""
    return F.pad(t, (0, max(0, _LEAST - t.shape[-1])))
