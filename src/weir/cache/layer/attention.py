"""Attention of a layer: rotated queries and keys, masks, whole prompts, and calls that fold on the
way (`WindowPiece`).

Pools read the last queries, or the attention that slots received, only when they fold, and until
then no slot moves. So queries wait in the slab, and the fold computes one matrix product instead of
one in every step.

If pools keep only the first and the newest tokens, it is known in advance which tokens the queries
of each chunk see. Then all chunks of a call are answered before anything is folded. One fold after
all chunks leaves the same slots as a fold after each chunk, because each token is quantized once,
and keys of the front are rotated from their masters. *Front*, *run* and *tail* are explained in
`layer_state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from weir import kernels
from weir.cache.layer.layer_state import LayerSpec, LayerState, Layout, lay_out
from weir.cache.plan import Segment, StepEnds
from weir.slab import (
    AttendedSlots,
    AttentionParams,
    LayerPositions,
    Rotary,
    Slab,
    Slots,
    as_read,
    attention_mass,
    compute_attention,
    merge_groups,
)

QUERY_BLOCK = 256
"""Number of queries computed at once, so that no mask has the size of the prompt squared."""


class NewTokens(NamedTuple):
    """New tokens in one layer, and how it attends.

    Attributes:
        queries: [batch, kv_heads, group, length, key_dim].
        keys, values: [batch, kv_heads, length, dim].
        params: the parameters of the layer's attention.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    params: AttentionParams

    def part(self, start: int, count: int) -> NewTokens:
        """View the tokens of the `count` columns from `start` on."""
        return self._map(lambda t: t.narrow(-2, start, count))

    def columns(self, index: Tensor) -> NewTokens:
        """Gather the tokens of the columns `index` [batch, n]."""

        def pick(t: Tensor) -> Tensor:
            each = index.view(index.shape[0], *(1,) * (t.ndim - 3), -1, 1)
            return t.gather(t.ndim - 2, each.expand(*t.shape[:-2], -1, t.shape[-1]))

        return self._map(pick)

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
    """Multiply each query by log_512(n), where n is the number of tokens that it sees (BUZZ,
    section 3.5).
    """
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

    With `in_step`, all rows have the same layout, and the segment's tokens are in the last slots.
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
    """Compute the bias on the logits of one query for each row, if rows end in different slots."""
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
    """Add the layer's linear biases, if it has any, to a mask. They are computed from the positions
    of slots in the rolling frame (`Slab.frame`).
    """
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
    """Answer every query of a prompt from its own token and the tokens before it, as far as the
    layer's window reaches; without `answers`, return zeros.

    Takes rotated tokens; rows may have fewer tokens than the segment is wide. Returns answers
    [batch, kv_heads, group, width, value_dim], and the tokens as slots.
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
    """Store queries [batch, kv_heads, group, width, key_dim] of a segment after those of the
    tail.
    """
    if slab.queries is None:
        return
    unasked = spec.chunk - spec.keeps_queries  # how many queries of a tail are read by no fold
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


class WindowPiece:
    """New tokens of all rows, in segments; there is a fold before each segment except the first.

    The indices in its chunks begin at the oldest token of the run, or at the first token of the
    tail if there is no run.

    Args:
        state: the layer's slots, which are not changed.
        lies: the layout of the slots before each segment.
        keys, values: those of the new tokens [batch, kv_heads, length, dim].
        segments: the segments; each has the same columns of all rows.
    """

    def __init__(
        self,
        state: LayerState,
        lies: Sequence[Layout],
        keys: Tensor,
        values: Tensor,
        segments: Sequence[Segment],
    ) -> None:
        assert state.slab is not None
        self._slab, self._spec, self._segments = state.slab, state.spec, segments
        self._lies = lies
        first, self._waiting = lies[0], segments[0].waiting[0]
        tail = slice(first.used - first.first, first.used - first.first + self._waiting)
        held = self._slab.keys[:, :, tail], self._slab.values[:, :, tail]
        self._new = [torch.cat(pair, dim=2) for pair in zip(held, (keys, values), strict=True)]

    @classmethod
    def of(
        cls, state: LayerState, keys: Tensor, values: Tensor, segments: Sequence[Segment]
    ) -> WindowPiece | None:
        """Describe a piece; None if there is only one segment, the rows have different layouts, or
        the layer does not keep just the first and the newest tokens (`keeps_window`).
        """
        spec = state.spec
        if len(segments) == 1 or not spec.keeps_window:
            return None
        tokens = sum(state.lengths[0])
        lies = [_layout_after(spec, tokens + c * spec.chunk) for c in range(len(segments))]
        if any(tuple(row) != lies[0].lengths for row in state.lengths):
            return None
        return cls(state, lies, keys, values, segments)

    def run_kernel(
        self, kernel: kernels.WindowKernel, queries: Tensor, params: AttentionParams
    ) -> Tensor:
        """Answer queries [batch, kv_heads, group, length, key_dim] with a kernel of
        `kernels.attend_window`.
        """
        first, chunk = self._lies[0], self._spec.chunk
        done, chunks = 0, []
        for fold, (lies, segment) in enumerate(zip(self._lies, self._segments, strict=True)):
            front, own = lies.front - lies.first, first.run + self._waiting + done
            start = first.run + fold * chunk - lies.run
            seen = front, start, start + lies.quantized, own
            chunks.append(kernels.WindowChunk(done, segment.width, *seen))
            done += segment.width
        exact, coded = self._tokens(chunks[-1].boundary)
        answers = kernel(queries, exact, coded, self._front(), chunks, params.scale)
        return answers.to(queries.dtype)

    def folded(self) -> tuple[Segment, Slots]:
        """Return the tokens that fold, as one segment and as slots."""
        before, last = self._segments[0], self._segments[-1]
        count = len(self._segments) * self._spec.chunk
        batch = len(before.counts)
        if not last.due:
            count -= self._spec.chunk
        segment = replace(before, counts=[count - self._waiting] * batch, due=list(range(batch)))
        keys, values = (t[:, :, :count] for t in self._new)
        weights = torch.zeros(keys.shape[:3], device=keys.device)
        position = self._place[:, None, None] + torch.arange(count, device=keys.device)
        position = position.expand(-1, keys.shape[1], -1)
        return segment, Slots(keys, values, weights, weights.clone(), position)

    def rest(self) -> tuple[Tensor, Tensor] | None:
        """Return the keys and values of the tail after the fold; None if the tail is empty."""
        last = self._segments[-1]
        if last.due:
            return None
        keys, values = (t[:, :, -last.width :] for t in self._new)
        return keys, values

    @cached_property
    def _place(self) -> Tensor:
        """The place in the stream of the first token of each row's tail [batch]."""
        return self._segments[0].start - self._waiting

    def _tokens(self, boundary: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return keys and values of all tokens of run, tail and piece, and those of the tokens
        before `boundary` as they are read after they have been quantized.
        """
        slab, first = self._slab, self._lies[0]
        run = slice(first.front - first.first, first.used - first.first)
        keys, values = (
            torch.cat([t[:, :, run], new], dim=2)
            for t, new in zip((slab.keys, slab.values), self._new, strict=True)
        )
        if slab.quantized is None:
            return (keys, values), (keys[:, :, :0], values[:, :, :0])
        stored = slab.quantized.keys, slab.quantized.values
        held = [read(0, first.quantized) for read in stored]
        later = max(0, boundary - first.quantized)
        codes = slab.quantized.format.keys, slab.quantized.format.values
        coded_keys, coded_values = (
            torch.cat([read, as_read(t[:, :, :later], code)], dim=2)
            for read, t, code in zip(held, (keys, values), codes, strict=True)
        )
        keys, values = (torch.cat(pair, dim=2) for pair in zip(held, (keys, values), strict=True))
        return (keys, values), (coded_keys, coded_values)

    def _front(self) -> tuple[Tensor, Tensor]:
        """Return keys of the front as each segment sees them [batch, kv_heads, segments, front,
        dim], and the values of the front.
        """
        slab, lies = self._slab, self._lies
        held, count = lies[0].front - lies[0].first, lies[-1].front - lies[-1].first
        keys, values = (
            torch.cat([t[:, :, :held], new[:, :, : count - held]], dim=2)
            for t, new in zip((slab.keys, slab.values), self._new, strict=True)
        )
        rotary, positions = self._spec.positions.rotary, self._spec.positions
        if rotary is None or not positions.rolling or not count:
            return keys[:, :, None].expand(-1, -1, len(lies), -1, -1), values
        masters = keys
        if slab.masters is not None:
            masters = torch.cat([slab.masters[:, :, :held], keys[:, :, held:]], dim=2)
        came = torch.arange(count - held, device=keys.device) + self._place[:, None]
        came = came[:, None].expand(-1, keys.shape[1], -1)
        position = torch.cat([slab.position[:, :, lies[0].first : lies[0].front], came], dim=2)
        folds = [
            fold * self._spec.chunk - lay.run - (lay.front - lay.first)
            for fold, lay in enumerate(lies[1:], 1)
        ]
        first = self._place[:, None] + torch.tensor(folds, device=keys.device)
        frames = first[:, None, :, None] + torch.arange(count, device=keys.device)
        by = (frames - position[:, :, None]).flatten(2)
        # All frames are computed in one call, because there are many with few keys each.
        copies = masters[:, :, None].expand(-1, -1, len(folds), -1, -1).flatten(2, 3)
        moved = rotary.move(copies, by).unflatten(2, (len(folds), count))
        return torch.cat([keys[:, :, None], moved], dim=2), values


def _layout_after(spec: LayerSpec, tokens: int) -> Layout:
    """Return the layout of a row after `tokens` tokens, each of which went to the first pool with
    room.
    """
    lengths = []
    for pool in spec.pipe.pools:
        lengths.append(0 if pool.shares_slots else min(tokens, pool.slots() or 0))
        tokens -= lengths[-1]
    return lay_out(spec.pipe, lengths)
