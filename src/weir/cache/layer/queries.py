"""Queries that wait in the slab, and the attention that slots receive from them.

Some pools look at the last queries when they fold; others rank tokens by the attention they have
received, H2O and its kin. Nobody asks before the next fold, and until then no slot moves; so the
queries wait in the slab, and a fold makes one matrix product of them in place of one in every step.
Knows nothing about who reads the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weir.cache.layer.mask import mask_of_piece
from weir.cache.layer.plan import Piece
from weir.cache.layer.spec import LayerSpec
from weir.slab import Form, Slab, attention_mass, merge_groups

_AT_ONCE = 1 << 24
"""Logits held at once."""


def store_queries(slab: Slab, spec: LayerSpec, queries: Tensor, piece: Piece) -> None:
    """Put a piece's queries behind those of the tail, where a pool is going to ask for them.

    Args:
        slab: `queries` has a place for each of the last queries that pools read, and behind them
            one for each token of the tail.
        spec: the layer.
        queries: [batch, kv_heads, group, width, key_dim].
        piece: their tokens; rows may stand in different places.
    """
    if slab.queries is None:
        return
    wanted = spec.pipe.needs_queries
    if piece.in_step:
        slab.store_queries(queries, wanted + piece.waiting[0])
    else:
        rows, places, _ = piece.entries
        slab.store_queries_at(queries, rows, wanted + piece.tail_places, places)


def store_last_queries(slab: Slab, spec: LayerSpec, queries: Tensor, piece: Piece) -> None:
    """Of a whole prompt, put the last queries in front of those of the tail; as `store_queries`."""
    if slab.queries is None:
        return
    wanted = spec.pipe.needs_queries
    for row, count in enumerate(piece.counts):
        last = queries[row : row + 1, :, :, max(0, count - wanted) : count]
        slab.queries[row, :, wanted - last.shape[3] : wanted] = merge_groups(last)[0]


def last_queries(slab: Slab, start: int, wanted: int) -> Tensor | None:
    """So many queries [batch, kv_heads, group, n, key_dim], from place `start` on; None for 0."""
    if slab.queries is None or not wanted:
        return None
    last = slab.queries[:, :, start : start + wanted]
    return last.unflatten(3, (-1, slab.keys.shape[3])).transpose(2, 3)


def tail_of(piece: Piece, rows: list[int], chunk: int) -> Piece:
    """The whole tails of some rows that are full after a piece."""
    return Piece(
        columns=piece.columns.new_zeros(len(rows), chunk),
        counts=[chunk] * len(rows),
        seen=[piece.seen[row] + piece.counts[row] - chunk for row in rows],
        waiting=[0] * len(rows),
        due=[],
        origin=piece.origin,
        device=piece.device,
    )


def mass_from_tail(slab: Slab, spec: LayerSpec, form: Form, tail: Piece, stop: int) -> Tensor:
    """The attention that slots receive from the queries of the tail.

    Args:
        slab: the slots of rows that lie alike; `queries` holds those of their tails.
        spec: the layer.
        form: how it attends.
        tail: the tokens of the tails (`tail_of`).
        stop: where the rows' slots end.

    Returns:
        [batch, kv_heads, stop], float32.
    """
    assert slab.queries is not None
    dim, first = slab.keys.shape[3], spec.pipe.needs_queries
    asked = slab.queries[:, :, first : first + tail.width].unflatten(3, (-1, dim))
    queries = asked.transpose(2, 3)
    bias = mask_of_piece(spec.positions, slab, tail, stop, torch.float32, in_step=True)
    keys, b = slab.read(0, stop)[0], slab.b[:, :, :stop]
    mass = torch.zeros_like(b)
    step = max(1, _AT_ONCE // (stop * queries.shape[:3].numel()))
    for start in range(0, tail.width, step):
        these = slice(start, start + step)
        its = bias if bias is None or bias.shape[3] == 1 else bias[:, :, :, these]
        mass += attention_mass(queries[:, :, :, these], keys, b, form, its)
    return mass
