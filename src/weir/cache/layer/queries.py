"""Queries that wait in the slab, and the attention that slots receive from them.

Some pools look at the last queries when they fold; others rank tokens by the attention they have
received, H2O and its kin. Nobody asks before the next fold, and until then no slot moves; so the
queries wait in the slab, and a fold makes one matrix product of them in place of one in every step.
Knows nothing about who reads the sums.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weir.cache.layer.mask import sight
from weir.cache.layer.plan import Piece
from weir.slab import Form, Place, Slab, attention_mass, lined

_AT_ONCE = 1 << 24
"""Logits held at once."""


def remember(slab: Slab, queries: Tensor, piece: Piece, wanted: int, *, even: bool) -> None:
    """Put a piece's queries behind those of the tail, where a pool is going to ask for them.

    Args:
        slab: `queries` has `wanted` places, and behind them those of the tail.
        queries: [batch, kv_heads, group, width, key_dim].
        piece: their tokens.
        wanted: how many of the last queries pools look at.
        even: all rows lie alike.
    """
    if slab.queries is None:
        return
    if even:
        slab.ask(queries, wanted + piece.waiting[0])
    else:
        rows, places, _ = piece.entries
        slab.ask_at(queries, rows, wanted + piece.tail_places, places)


def remember_last(slab: Slab, queries: Tensor, piece: Piece, wanted: int) -> None:
    """Of a whole prompt, put the last queries in front of those of the tail; as `remember`."""
    if slab.queries is None:
        return
    for row, count in enumerate(piece.counts):
        last = queries[row : row + 1, :, :, max(0, count - wanted) : count]
        slab.queries[row, :, wanted - last.shape[3] : wanted] = lined(last)[0]


def last_queries(slab: Slab, start: int, wanted: int) -> Tensor | None:
    """So many queries [batch, kv_heads, group, n, key_dim], from place `start` on; None for 0."""
    if slab.queries is None or not wanted:
        return None
    last = slab.queries[:, :, start : start + wanted]
    return last.unflatten(3, (-1, slab.keys.shape[3])).transpose(2, 3)


def tail_of(piece: Piece, chunk: int) -> Piece:
    """The whole tails of the rows that are full after a piece; no token of the others."""
    full = set(piece.full)
    rows = range(len(piece.counts))
    counts = [chunk if row in full else 0 for row in rows]
    after = [seen + count for seen, count in zip(piece.seen, piece.counts, strict=True)]
    return replace(
        piece,
        columns=piece.columns.new_zeros(len(counts), chunk),
        counts=counts,
        seen=[seen - count for seen, count in zip(after, counts, strict=True)],
        waiting=[0 for _ in rows],
    )


def received(
    slab: Slab, place: Place, form: Form, tail: Piece, ends: list[int], wanted: int
) -> Tensor:
    """The attention that slots receive from the queries of the tail.

    Args:
        slab: the slots; `queries` holds those of the tail after `wanted` older ones.
        place: what the layer knows about positions.
        form: how it attends.
        tail: the tokens of the tail (`tail_of`).
        ends: where each row's slots end.
        wanted: queries in front of the tail's.

    Returns:
        [batch, kv_heads, slots of the longest row], float32; zero in rows without a token here.
    """
    assert slab.queries is not None
    even = tail.even and len(set(ends)) == 1
    stop, dim = max(ends), slab.keys.shape[3]
    asked = slab.queries[:, :, wanted : wanted + tail.width].unflatten(3, (-1, dim))
    queries = asked.transpose(2, 3)
    bias = sight(place, slab, tail, stop, torch.float32, even=even)
    keys, b = slab.keys[:, :, :stop], slab.b[:, :, :stop]
    mass = torch.zeros_like(b)
    step = max(1, _AT_ONCE // (stop * queries.shape[:3].numel()))
    for start in range(0, tail.width, step):
        these = slice(start, start + step)
        its = bias if bias is None or bias.shape[3] == 1 else bias[:, :, :, these]
        mass += attention_mass(queries[:, :, :, these], keys, b, form, its)
    return mass
