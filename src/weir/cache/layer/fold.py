"""A fold of one layer: the pipe selects the slots to keep, and the slab is compacted."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from weir.cache.layer.attention import mask_of_piece
from weir.cache.layer.layer_state import LayerSpec, LayerState, Layout, lay_out
from weir.cache.plan import Segment
from weir.policies import Pipe
from weir.pools import Fold, ObservedAttention
from weir.slab import (
    AT_ONCE,
    AttentionParams,
    AttentionResult,
    Slab,
    Slots,
    attention_mass,
    copy_if_shared,
    roll_positions,
    shift_spans,
)


@dataclass(frozen=True)
class Pending:
    """A segment that has been answered but not committed.

    Attributes:
        segment, params: the segment, and how the layer attends.
        arrivals: tokens [batch, ...] to fold instead of the tail: a whole prompt, or the tail and
            new tokens together (`WindowPiece`).
        mass: the attention each slot received from the segment [batch, kv_heads, slots], if the
            segment is the whole tail and this was computed with the answers. If it is None, the
            fold computes it, provided that a pool needs it.
        observed: the attention of the segment's queries, if a pool needs it and it was computed
            with the answers. If it is None, the fold computes the attention that a pool needs.
    """

    segment: Segment
    params: AttentionParams
    arrivals: Slots | None = None
    mass: Tensor | None = None
    observed: AttentionResult | None = None


# A fold makes hundreds of small tensors, and each is cheaper to make without gradients.
@torch.inference_mode()
def fold_rows(state: LayerState, pending: Pending) -> None:
    """Fold the rows that are due; rows of the same layout fold together."""
    pipe, slab, segment = state.spec.pipe, state.slab, pending.segment
    assert slab is not None
    groups: dict[tuple[tuple[int, ...], int, Hashable], list[int]] = {}
    for row in segment.due:
        arrived = segment.waiting[row] + segment.counts[row]
        key = tuple(state.lengths[row]), arrived, _marks_key(pipe, segment, row, arrived)
        groups.setdefault(key, []).append(row)
    for (lengths, arrived, _), rows in groups.items():
        every = len(rows) == slab.keys.shape[0]
        index = None if every else torch.tensor(rows, device=slab.keys.device)
        part = _rows(pipe, slab, rows, index)
        kept = _fold_alike(state, pending, part, lay_out(pipe, lengths), arrived, rows, index)
        keep_older_queries(part, state.spec.chunk)
        if index is not None and part.keys.data_ptr() != slab.keys[rows[0]].data_ptr():
            if pipe.slots is None:
                slab.grow(len(part), 0 if part.masters is None else part.masters.shape[2])
            slab.put_rows(index, part)
        for row in rows:
            state.lengths[row] = kept
    state.refresh()


def _fold_alike(
    state: LayerState,
    pending: Pending,
    slab: Slab,
    lies: Layout,
    arrived: int,
    rows: list[int],
    index: Tensor | None,
) -> list[int]:
    """Fold `rows` of one layout, the only ones in `slab`; returns the new lengths.

    `index` has the same rows as a tensor, None for all of the batch.
    """
    spec, segment, params, prompt = state.spec, pending.segment, pending.params, pending.arrivals
    if prompt is not None:
        new = (prompt if index is None else prompt.of_rows(index)).part(0, arrived)
    else:
        end = lies.used + arrived
        new = slab.run(lies.used, end)
        if slab.mass is not None and spec.pipe.needs_mass:
            received = pending.mass if index is None else None
            if received is None:
                tail = tail_of(segment, rows, spec.chunk)
                received = mass_from_tail(slab, spec, params, tail, end)
            slab.mass[:, :, : received.shape[2]] += received
    queries = last_queries(slab, spec.pipe.needs_queries)
    # Pools may keep these, and the next tokens' queries will overwrite the buffer.
    queries = None if queries is None else queries.clone()
    ahead, clock = segment.after, segment.clock
    if index is not None:
        ahead, clock = ahead[index], clock[index]
    observed = pending.observed if index is None else None
    seeds = tuple(state.seeds[row] for row in rows)
    fold = Fold(
        draws=replace(spec.draws, seed=seeds[0] if len(set(seeds)) == 1 else seeds),
        seen=ahead - segment.origin,  # a copy, so a pool may write to it
        queries=queries,
        read=_reading(spec, slab, lies, new, queries, ahead, params, observed),
        prompt=prompt is not None,
        origin=segment.origin,
        form=params,
        alibi=spec.positions.alibi,
    )
    fold = _with_marks(fold, spec.pipe, segment, rows)
    return _fold_slab(spec, slab, lies, new, fold, ahead, clock)


def last_queries(slab: Slab, wanted: int) -> Tensor | None:
    """Return a view of the last queries [batch, kv_heads, group, wanted, key_dim]; None if none are
    wanted or stored.
    """
    if slab.queries is None or not wanted:
        return None
    last = slab.queries[:, :, slab.queries.shape[2] - wanted :]
    return last.unflatten(3, (-1, slab.keys.shape[3])).transpose(2, 3)


def keep_older_queries(slab: Slab, chunk: int) -> None:
    """After a fold, move the newest queries to the beginning of the buffer, so that its last
    `chunk` places are free for the next tokens.
    """
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


def _marks_key(pipe: Pipe, segment: Segment, row: int, arrived: int) -> Hashable:
    """Return the part of a row's marks that decides how many tokens its pools keep."""
    if not pipe.needs_marks:
        return ()
    marks = segment.marks[row]
    after = segment.origin + segment.seen[row] + segment.counts[row]
    far = math.inf if pipe.slots is None else pipe.slots + arrived + marks.header
    since, before = after - marks.turn, marks.turn - segment.origin
    kept = tuple(min(after - place, far) for one in marks.kept for place in one)
    return marks.beginning, marks.header, min(since, far), min(before, far), kept


def _with_marks(fold: Fold, pipe: Pipe, segment: Segment, rows: list[int]) -> Fold:
    """Return a fold with the marks of the rows that fold together, if the pipe needs them."""
    if not pipe.needs_marks:
        return fold
    of_rows = [segment.marks[row] for row in rows]
    turn = torch.tensor([marks.turn for marks in of_rows], device=segment.device)
    kept = None
    if of_rows[0].kept:
        kept = torch.tensor([marks.kept for marks in of_rows], device=segment.device)
    one = of_rows[0]
    return replace(fold, beginning=one.beginning, turn=turn, header=one.header, kept=kept)


def _rows(pipe: Pipe, slab: Slab, rows: list[int], index: Tensor | None) -> Slab:
    """Return rows of a slab.

    Adjacent rows of a pipe with a limit are a view, and all rows of the batch are the slab itself.
    Other rows are copies.

    `index` has the same rows as a tensor, None for all of the batch.
    """
    if index is None:
        return slab
    if pipe.slots is not None and rows[-1] - rows[0] == len(rows) - 1:
        return slab.view(rows[0], rows[-1] + 1)
    return slab.rows(index)


def _reading(
    spec: LayerSpec,
    slab: Slab,
    lies: Layout,
    new: Slots,
    queries: Tensor | None,
    ahead: Tensor,
    params: AttentionParams,
    observed: AttentionResult | None,
) -> ObservedAttention:
    """Return the attention of the last queries over a slab of one layout, which is computed only if
    a pool asks for it.
    """
    return ObservedAttention(
        partial(_join_all, slab, lies, new),
        lambda: _frame(spec, slab, lies, ahead - len(new)),
        queries,
        ahead,
        params,
        spec.positions,
        spec.output,
        len(new),
        observed,
        spec.gate,
        spec.pipe.needs_queries or None,
    )


def _fold_slab(
    spec: LayerSpec,
    slab: Slab,
    before: Layout,
    new: Slots,
    fold: Fold,
    ahead: Tensor,
    clock: Tensor,
) -> list[int]:
    """Fold a slab whose rows have one layout; returns the new lengths.

    `ahead` [batch] is each row's next place in the stream, and `clock` [batch] its next place on
    three axes.
    """
    pipe, chunk = spec.pipe, spec.chunk
    held: list[Slots] = [new] * len(before.order)
    for pool, start in before.starts.items():
        view = slab.front if pool in pipe.front else slab.run
        held[pool] = view(start, start + before.lengths[pool])
    states = states_of(pipe, slab)
    kept = pipe.fold(held, new, fold, states)
    _remember_states(slab, states)
    after = lay_out(pipe, [len(slots) for slots in kept])
    moves, shared = [], slab.storages()
    for pool, start in after.starts.items():
        slots = kept[pool]
        # Slots that a pool returns unchanged, or as a view of the run, need no copy if they
        # are already in their new place.
        untouched = slots is held[pool] or (slots.slab is slab and pool in pipe.run)
        was = slots.place if slots.slab is slab else before.starts[pool]
        if not (untouched and was == start) and len(slots):
            moves.append((start, copy_if_shared(slots, shared), pool in pipe.front))
    if after.used + chunk > len(slab):
        slab.grow(2 * (after.used + chunk))
    in_front = after.front - after.first
    if slab.masters is not None and in_front > slab.masters.shape[2]:
        slab.grow(0, masters=2 * in_front)
    for place, slots, to_front in moves:
        slab.write(place, slots, front=to_front)
    slab.empty(after.quantized, before.quantized)
    roll(spec, slab, after, ahead, clock)
    slab.open_tail(after.used, ahead, chunk)
    return [len(slots) for slots in kept]


def states_of(pipe: Pipe, slab: Slab) -> list[dict[str, Tensor]]:
    """Return the state of each pool, by the pool's own names."""
    states: list[dict[str, Tensor]] = [{} for _ in pipe.pools]
    for name, t in slab.state.items():
        index, _, own = name.partition(".")
        states[int(index)][own] = t
    return states


def _remember_states(slab: Slab, states: list[dict[str, Tensor]]) -> None:
    """Write the state of each pool into the slab."""
    for name, t in slab.state.items():
        index, _, own = name.partition(".")
        after = states[int(index)][own]
        if after.shape != t.shape:  # a pool without a limit can lengthen its state
            with torch.inference_mode(False):
                slab.state[name] = after.clone()
        elif after is not t:
            t.copy_(after)


def roll(
    spec: LayerSpec, slab: Slab, lies: Layout, ahead: Tensor, clock: Tensor | None = None
) -> None:
    """Move the front of rows of one layout up to the run, in the rolling frame.

    `ahead` is each row's next place in the stream [batch], int64. `clock` is its next place on
    three axes, and is read only if slots have spans.
    """
    exact, quantized = slice(lies.first, lies.front), slice(0, lies.quantized_front)
    position = _in_front(slab.position, lies)
    frame = _frame(spec, slab, lies, ahead, clock)
    rotary = spec.positions.rotary
    count = lies.front - lies.first
    if spec.positions.rolling and rotary is not None:
        shift = frame - position
        if slab.masters is not None and count:
            masters = slab.masters[:, :, :count]
            rotary.move(masters, shift[:, :, :count], slab.keys[:, :, :count])
        if slab.quantized is not None and lies.quantized_front:
            masters = slab.quantized.masters(0, lies.quantized_front)
            slab.quantized.write_keys(0, rotary.move(masters, shift[:, :, count:]))
    if slab.frame is not None:
        slab.frame[:, :, exact], slab.frame[:, :, quantized] = frame.split(
            [count, lies.quantized_front], dim=2
        )
        for run in (slice(lies.quantized_front, lies.quantized), slice(lies.front, lies.used)):
            slab.frame[:, :, run] = slab.position[:, :, run]


def _frame(
    spec: LayerSpec, slab: Slab, lies: Layout, ahead: Tensor, clock: Tensor | None = None
) -> Tensor:
    """Compute the front's positions in the frame [batch, kv_heads, front]: exact slots, then
    quantized.
    """
    position = _in_front(slab.position, lies)
    if slab.span is not None and position.shape[2]:
        if lies.run or clock is None:
            # the first token of the run, or the first that arrived
            newest = lies.quantized_front if lies.quantized > lies.quantized_front else lies.front
            clock = slab.span[:, 0, newest, 0]
        return position + shift_spans(position, _in_front(slab.span, lies), clock)
    if spec.positions.rolling and position.shape[2]:
        return roll_positions(position, ahead - lies.run)
    return position


def _join_all(slab: Slab, lies: Layout, new: Slots) -> Slots:
    """Join all slots of a slab of one layout: the front, the run and the new tokens."""
    whole = slab.run(lies.first, lies.used)
    if lies.quantized:
        front, run = slab.run(lies.first, lies.front), slab.run(lies.front, lies.used)
        whole = front.join(slab.run(0, lies.quantized)).join(run)
    return whole.join(new)


def _in_front(t: Tensor, lies: Layout) -> Tensor:
    """Return the front's slots of `t` [batch, kv_heads, slots, ...]: exact, then quantized."""
    exact = t[:, :, lies.first : lies.front]
    # The exact slots include the sinks, the oldest tokens, so the front is mostly in order.
    return (
        torch.cat([exact, t[:, :, : lies.quantized_front]], dim=2)
        if lies.quantized_front
        else exact
    )
