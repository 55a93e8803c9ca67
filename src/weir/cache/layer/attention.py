"""Attention of a layer: rotated queries and keys, masks, whole prompts, and what folds will ask.

Pools read the last queries, or the attention received, only when they fold, and until then no slot
moves. So queries wait in the slab, and the fold computes one matrix product in place of one in
every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from weir.cache.layer.layer_state import LayerSpec, LayerState
from weir.cache.layer.plan import Segment, StepEnds
from weir.slab import (
    AT_ONCE,
    AttendedSlots,
    AttentionParams,
    LayerPositions,
    Rotary,
    Slab,
    Slots,
    attention_mass,
    attention_softmax,
    compute_attention,
    compute_logits,
    merge_groups,
)

QUERY_BLOCK = 256
"""Queries computed at once, so that no mask is as large as the prompt squared."""


class NewTokens(NamedTuple):
    """New tokens in one layer, and how it attends.

    Attributes:
        queries: [batch, kv_heads, group, length, key_dim].
        keys, values: [batch, kv_heads, length, dim].
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    params: AttentionParams

    def part(self, start: int, count: int) -> NewTokens:
        """View the tokens of `count` columns."""
        return self._map(lambda t: t.narrow(-2, start, count))

    def columns(self, index: Tensor) -> NewTokens:
        """Gather the tokens of the columns `index` [batch, n]."""

        def pick(t: Tensor) -> Tensor:
            each = index.view(index.shape[0], *(1,) * (t.ndim - 3), -1, 1)
            return t.gather(t.ndim - 2, each.expand(*t.shape[:-2], -1, t.shape[-1]))

        return self._map(pick)

    def row(self, row: int) -> NewTokens:
        """View one row, as a batch of its own."""
        return self._map(lambda t: t[row : row + 1])

    def _map(self, change: Callable[[Tensor], Tensor]) -> NewTokens:
        queries, keys, values, params = self
        return NewTokens(change(queries), change(keys), change(values), params)

    def rotated(self, spec: LayerSpec, slab: Slab, segment: Segment) -> NewTokens:
        """Rotate queries and keys of a segment to their places."""
        queries, keys, values, params = self
        if spec.positions.rotary is not None and not spec.positions.placed:
            queries, keys = _rotate(spec.positions.rotary, queries, keys, segment.positions)
        if spec.pipe.log_n:
            queries = _scale_by_log_n(slab, queries, segment)
        return NewTokens(queries, keys, values, params)


def _rotate(
    rotary: Rotary, queries: Tensor, keys: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys of a segment in one call."""
    kv_heads, group = queries.shape[1:3]
    both = rotary.rotate(torch.cat([queries.flatten(1, 2), keys], dim=1), positions)
    queries, keys = both.split([kv_heads * group, kv_heads], dim=1)
    return queries.unflatten(1, (kv_heads, group)), keys


def _scale_by_log_n(slab: Slab, queries: Tensor, segment: Segment) -> Tensor:
    """Multiply each query by log_512(n), n being the tokens it sees (BUZZ, section 3.5)."""
    position, start = slab.position, segment.start[:, None, None]
    before = ((position >= 0) & (position < start)).sum(dim=2, keepdim=True)
    n = before + torch.arange(1, segment.width + 1, device=position.device)
    factor = n.log() / math.log(512)
    return (queries * factor[:, :, None, :, None]).to(queries.dtype)


def mask_of_piece(
    positions: LayerPositions,
    slab: Slab,
    segment: Segment,
    stop: int,
    dtype: torch.dtype,
    *,
    in_step: bool,
) -> Tensor | None:
    """Compute the bias on the logits of a segment's queries over the first `stop` slots.

    With `in_step` all rows have one layout, and the segment's tokens are the last of the slots.
    Returns -inf for slots that a query must not see, broadcasting with [batch, kv_heads, group,
    width, slots]; None if every query sees every slot.
    """
    width, window = segment.width, positions.window
    bias: Tensor | None = None
    if not in_step:
        # A slot that waits for its token carries a position in the future.
        ahead = segment.positions[:, :, None, :, None] - slab.position[:, :, None, None, :stop]
        seen = (ahead >= 0) & segment.real[:, None, None, :, None]
        if window is not None:
            seen &= ahead < window
        bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -torch.inf)
    elif width > 1 or (window is not None and stop > window):
        bias = _cached_band(width, stop, window, dtype, slab.position.device)
    return _add_alibi(bias, positions, slab, segment, stop)


def mask_of_step(
    positions: LayerPositions, slab: Slab, segment: Segment, ends: StepEnds, dtype: torch.dtype
) -> Tensor | None:
    """Compute the bias on the logits of one query a row, if rows end in different slots."""
    return _add_alibi(ends.mask(positions.window, dtype), positions, slab, segment, ends.stop)


def band(
    width: int, stop: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Make the causal mask of the last `width` of `stop` tokens [1, 1, 1, width, stop]."""
    with torch.inference_mode(False):
        query = torch.arange(stop - width, stop, device=device)[:, None]
        ahead = query - torch.arange(stop, device=device)
        seen = ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        return mask.masked_fill_(~seen, -torch.inf)[None, None, None]


_cached_band = lru_cache(maxsize=8)(band)


def _add_alibi(
    bias: Tensor | None, positions: LayerPositions, slab: Slab, segment: Segment, stop: int
) -> Tensor | None:
    """Add the layer's linear biases to a mask, if it has any: slots are at places in the frame."""
    alibi = positions.alibi
    if alibi is None or slab.frame is None:
        return bias
    frame = slab.frame[:, :, :stop]
    first: Tensor | int = 0
    if positions.rolling and alibi.rounding is not None:
        far = torch.iinfo(frame.dtype).max
        empty = slab.position[:, :, :stop] < 0
        first = frame.masked_fill(empty, far).amin(dim=2, keepdim=True)
    added = alibi.bias(frame, frame.shape[1], first, segment.start[:, None, None])
    return added if bias is None else bias + added


def attend_prompt(
    spec: LayerSpec, new: NewTokens, segment: Segment, answers: bool = True
) -> tuple[Tensor, Slots]:
    """Answer every query of a prompt from all tokens before it; without `answers` they are zeros.

    Takes rotated tokens; rows may have fewer. Returns answers [batch, kv_heads, group, width,
    value_dim], and the tokens.
    """
    queries, keys, values, params = new
    kv_heads, width, positions = keys.shape[1], segment.width, spec.positions
    zeros = torch.zeros(keys.shape[:3], device=keys.device)
    received = zeros.clone() if spec.pipe.needs_mass else None
    steps = torch.arange(width, device=keys.device)[None, None]
    outs = []
    asked = answers or received is not None
    for start in range(0, width if asked else 0, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, width)
        bias = band(stop - start, stop, positions.window, queries.dtype, keys.device)
        if positions.alibi is not None:
            bias = bias + positions.alibi.bias(steps[..., :stop], kv_heads, 0, stop - 1)
        block, k, v = queries[:, :, :, start:stop], keys[:, :, :stop], values[:, :, :stop]
        weights = zeros[..., :stop]
        if received is not None:
            real = torch.where(segment.real[:, None, None, start:stop, None], 0.0, -torch.inf)
            received[:, :, :stop] += attention_mass(block, k, weights, params, bias + real)
        if not answers:
            continue
        slots = AttendedSlots(k, v, None, weights, weights, None, 0, stop, plain=True)
        outs.append(compute_attention(block, slots, params, bias, by="torch").answers)
    position = segment.positions.expand(-1, kv_heads, -1)
    shape = (*queries.shape[:-1], values.shape[3])
    out = torch.cat(outs, dim=3) if answers else values.new_zeros(shape)
    spans = None
    if spec.moves_on_axes:
        spans = segment.spans[:, None].expand(-1, kv_heads, -1, -1)
    return out, Slots(keys, values, zeros, zeros.clone(), position, received, spans)


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
        merged = merge_groups(queries)[rows[stays], :, columns[stays]]
        slab.queries[rows[stays], :, places[stays]] = merged


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


def read_again(state: LayerState, row: int, new: NewTokens, segment: Segment) -> Tensor:
    """Answer the queries of repeated tokens of one row, and note what the originals were given.

    After a fold the model reads the last chunk once more, with the slots as they stand, as if it
    were asked to repeat it. Nobody keeps the repeated tokens. What stays is a number beside each
    token of the chunk: the largest share of its attention that one of the repeated queries gave it.

    Args:
        state: the layer's slots; `Slab.mass` of the row's last tokens is set, if the pipe asks.
        row: the row; its tail is empty.
        new: the last tokens once more, in a batch of one row.
        segment: these, behind all others.

    Returns:
        [1, kv_heads, group, width, value_dim].
    """
    assert state.slab is not None
    used, width, spec = state.used[row], segment.width, state.spec
    slab = state.slab.view(row, row + 1).copy()
    slab.grow(used + width)
    slab.open_tail(used, segment.start, width)
    queries, keys, values, params = new.rotated(spec, slab, segment)
    slab.append(keys, values, used)
    if slab.span is not None:
        slab.span.narrow(2, used, width).copy_(segment.spans[:, None])
    stop, start = used + width, state.first
    bias = mask_of_piece(spec.positions, slab, segment, stop, queries.dtype, in_step=True)
    if spec.pipe.needs_second_reading:
        mine = slab.run(start, stop)
        some = bias if bias is None or bias.shape[4] == 1 else bias[..., start:]
        shares = attention_softmax(compute_logits(queries, mine.keys, params, some), mine.b, params)
        most = shares.amax(dim=(2, 3)).nan_to_num_(0.0)[:, :, : used - start]
        mass = state.slab.mass
        assert mass is not None
        position = state.slab.position[row, :, start:used]
        again = position >= segment.start - width
        mass[row, :, start:used] = most[0].where(again, mass[row, :, start:used])
    slots = slab.attended(start, stop)
    return compute_attention(queries, slots, params, bias).answers
