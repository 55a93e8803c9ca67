"""Queries that wait in the slab, and the attention that slots receive from them.

Pools read the last queries, or the attention received, only when they fold, and until then no slot
moves. So the fold computes one matrix product in place of one in every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weir.cache.layer.attention import mask_of_piece
from weir.cache.layer.plan import Segment
from weir.cache.layer.spec import LayerSpec
from weir.slab import AT_ONCE, AttentionParams, Slab, attention_mass, merge_groups


def store_queries(slab: Slab, spec: LayerSpec, queries: Tensor, segment: Segment) -> None:
    """Store queries [batch, kv_heads, group, width, key_dim] of a segment behind the tail's."""
    if slab.queries is None:
        return
    unasked = spec.chunk - spec.keeps_queries  # first queries of a tail, which no fold reads
    if segment.in_step:
        first = max(0, unasked - segment.waiting[0])
        if first < segment.width:
            place = spec.query_place(segment.waiting[0] + first)
            slab.store_queries(queries[:, :, :, first:], place)
    else:
        rows, columns, _ = segment.entries
        places = segment.tail_places - unasked
        stays = places >= 0
        slab.store_queries_at(queries, rows[stays], places[stays], columns[stays])


def store_last_queries(slab: Slab, spec: LayerSpec, queries: Tensor, segment: Segment) -> None:
    """Store the last queries of a whole prompt for the fold; arguments as in `store_queries`."""
    if slab.queries is None:
        return
    wanted = spec.pipe.needs_queries
    for row, count in enumerate(segment.counts):
        last = queries[row : row + 1, :, :, max(0, count - wanted) : count]
        start = slab.queries.shape[2] - last.shape[3]
        slab.queries[row, :, start:] = merge_groups(last)[0]


def last_queries(slab: Slab, wanted: int) -> Tensor | None:
    """View of the last queries [batch, kv_heads, group, wanted, key_dim]; None for 0."""
    if slab.queries is None or not wanted:
        return None
    last = slab.queries[:, :, slab.queries.shape[2] - wanted :]
    return last.unflatten(3, (-1, slab.keys.shape[3])).transpose(2, 3)


def keep_older_queries(slab: Slab, chunk: int) -> None:
    """Make room for the queries of the next `chunk` tokens after a fold; older ones move up."""
    if slab.queries is not None and slab.queries.shape[2] > chunk:
        older = slab.queries[:, :, chunk:].clone()
        slab.queries[:, :, : older.shape[2]] = older


def tail_of(segment: Segment, rows: list[int], chunk: int) -> Segment:
    """Build the segment of the whole tails of `rows`, which are full after `segment`."""
    return Segment(
        columns=segment.columns.new_zeros(len(rows), chunk),
        counts=[chunk] * len(rows),
        seen=[segment.seen[row] + segment.counts[row] - chunk for row in rows],
        waiting=[0] * len(rows),
        due=[],
        origin=segment.origin,
        device=segment.device,
    )


def mass_from_tail(
    slab: Slab, spec: LayerSpec, params: AttentionParams, tail: Segment, stop: int
) -> Tensor:
    """Compute the attention [batch, kv_heads, stop], float32, that slots get from the tail's
    queries.

    Takes rows of one layout, and the tokens of their tails (`tail_of`).
    """
    queries = last_queries(slab, tail.width)
    assert queries is not None
    bias = mask_of_piece(spec.positions, slab, tail, stop, torch.float32, in_step=True)
    keys, b = slab.read(0, stop)[0], slab.b[:, :, :stop]
    mass = torch.zeros_like(b)
    step = max(1, AT_ONCE // (stop * queries.shape[:3].numel()))
    for start in range(0, tail.width, step):
        these = slice(start, start + step)
        mask = bias if bias is None or bias.shape[3] == 1 else bias[:, :, :, these]
        mass += attention_mass(queries[:, :, :, these], keys, b, params, mask)
    return mass
