"""One layer's stream: append, attend, and commit when a forward has succeeded.

A forward that fails in a later layer, or makes keys that are not finite, must leave no trace. It
writes only into tail slots that wait for a token anyway; the fold and the attention received wait
in `Layer._pending` until it has succeeded. A forward that is longer than the free part of the tail
commits all but its last segment on the way, and the layer keeps a copy of its slots until it ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weir import kernels
from weir.cache.layer.attention import (
    NewTokens,
    WindowPiece,
    attend_prompt,
    mask_of_piece,
    mask_of_step,
    read_again,
    store_last_queries,
    store_queries,
)
from weir.cache.layer.fold import Pending, fold_rows
from weir.cache.layer.layer_state import LayerSpec, LayerState
from weir.cache.plan import ForwardPlan, Segment, plan_forward
from weir.errors import WeirError
from weir.slab import (
    AttentionParams,
    DecodeSlots,
    Heads,
    HeldPart,
    Observe,
    Slab,
    compute_attention,
    merge_groups,
    put_lines,
)


@dataclass(frozen=True)
class Backup:
    """Copy of a layer from before the current forward; `slab` is None if it held no tokens."""

    slab: Slab | None
    lengths: list[list[int]]


class Layer:
    """The stream of one layer, or of some of its KV heads: its slots, and the forward under way.

    Attributes:
        spec: the layer's fixed facts.
        state: the slots, and how each row of the batch uses them.
        params: the parameters of the last attention call; None before the first token. An engine
            has read them before its steps, and the fold reads them here.
        unchecked: tensors of the last forward, [batch, ...] each, whose numbers must be finite (or
            true). One check of all layers at the end of a step is cheaper than one a layer.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.state = LayerState(spec)
        self.reset()

    def reset(self) -> None:
        """Forget everything and free the slots."""
        self.state.reset()
        self.params: AttentionParams | None = None
        self.unchecked: list[Tensor] = []
        self._pending: Pending | None = None
        self._backup: Backup | None = None
        self._fold_seconds = 0.0

    def feed(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        params: AttentionParams,
        *,
        seen: int = 0,
        waiting: int = 0,
        prefill: bool = False,
        answers: bool = True,
    ) -> Tensor:
        """Call `attend` and `commit` for tokens of rows that are in step; see there.

        `seen` tokens came before, `waiting` of them in the tail. `prefill` attends to all tokens
        exactly and folds them once, without `answers` only storing them.
        """
        batch, length = keys.shape[0], keys.shape[2]
        plan = plan_forward(
            None,
            batch,
            length,
            [seen] * batch,
            [waiting] * batch,
            self.spec.chunk,
            keys.device,
            prefill=prefill,
        )
        out = self.attend(queries, keys, values, params, plan, answers)
        self.commit()
        return out

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        params: AttentionParams,
        plan: ForwardPlan,
        answers: bool = True,
    ) -> Tensor:
        """Append new tokens and answer their queries; call `commit` or `undo` next.

        Args:
            queries: [batch, heads, length, key_dim], unrotated unless `spec.positions.placed`.
            keys, values: [batch, kv_heads, length, dim], keys rotated as the queries are.
            answers: whether to answer the queries of a whole prompt; others always are.

        Raises:
            RowsNotFinite: keys or values are infinite or NaN; in a step the check is at its end
                (`unfinite`).
            WeirError: keys differ in dtype, device or shape from those before.
        """
        self.params = params
        batch, heads, length, _ = queries.shape
        kv_heads = keys.shape[1]
        queries = queries.view(batch, kv_heads, heads // kv_heads, length, -1)
        if not plan.segments:
            self.unchecked = []
            return values.new_zeros((batch, heads, length, values.shape[3]))
        self._check_finite(keys, values, plan)
        if self.state.slab is None:
            self._backup = Backup(None, [])
            group = heads // kv_heads
            sizes = Heads(kv_heads, group, keys.shape[3], values.shape[3], keys.dtype)
            first = plan.segments[0].start
            self.state.allocate(sizes, batch, first, keys.device)
        self._check_like(keys, values)
        new = NewTokens(queries, keys, values, params)
        if plan.step:
            return self._attend_step(new, plan.segments[0]).flatten(1, 2)
        exactly = partial(self._attend_exactly, answers=answers)
        by_piece = partial(self._attend_piece, last=plan.segments[-1])
        take = exactly if plan.prefill else by_piece
        if plan.regular and len(plan.segments) == 1:
            return take(new, plan.segments[0]).flatten(1, 2)
        if plan.regular:
            together = self._attend_together(new, plan)
            if together is not None:
                return together.flatten(1, 2)
            parts, done = [], 0
            for segment in plan.segments:
                parts.append(take(new.part(done, segment.width), segment))
                done += segment.width
            return torch.cat(parts, dim=3).flatten(1, 2)
        out = values.new_zeros((*queries.shape[:4], values.shape[3]))
        for segment in plan.segments:
            part = take(new.columns(segment.columns), segment)
            rows, places, columns_of = segment.entries
            out[rows, :, :, columns_of] = part[rows, :, :, places]
        return out.flatten(1, 2)

    # --- finite or not

    def _check_finite(self, keys: Tensor, values: Tensor, plan: ForwardPlan) -> None:
        """Refuse keys and values of tokens that are not finite, now or at the forward's end."""
        if plan.step:
            self.unchecked = [keys, values]
            return
        self.unchecked = []
        if not keys.numel():
            return
        if keys.device.type == "cpu":
            # The minimum and the maximum are enough: NaN makes both NaN.
            if all(map(math.isfinite, [*keys.aminmax(), *values.aminmax()])):
                return
            columns = first_unfinite(finite_columns(keys, values), plan)
            if columns:
                raise RowsNotFinite(self.spec.index, columns)
        else:
            self.unchecked = [finite_columns(keys, values)]

    def unfinite(self, plan: ForwardPlan) -> dict[int, int]:
        """Find each row's first column that is not finite in the last forward; {} if all are."""
        if not self.unchecked:
            return {}
        if self.unchecked[0].dtype == torch.bool:
            return first_unfinite(self.unchecked[0], plan)
        finite = torch.stack(
            [t.isfinite().reshape(t.shape[0], -1).all(dim=1) for t in self.unchecked]
        )
        return dict.fromkeys((~finite.all(dim=0)).nonzero()[:, 0].tolist(), 0)

    def _check_like(self, keys: Tensor, values: Tensor) -> None:
        """Refuse keys and values that do not fit the existing slots."""
        slab = self.state.slab
        assert slab is not None
        if keys.dtype != slab.keys.dtype or keys.device != slab.keys.device:
            was = f"{str(slab.keys.dtype).removeprefix('torch.')} on {slab.keys.device}"
            now = f"{str(keys.dtype).removeprefix('torch.')} on {keys.device}"
            raise WeirError(
                f"the model was {was} when this cache was made and is {now} now. Move it back, or "
                "make a new cache."
            )
        if keys.shape[1] != slab.keys.shape[1] or keys.shape[3] != slab.keys.shape[3]:
            raise WeirError(
                f"layer {self.spec.index} makes keys of {keys.shape[1]} heads of {keys.shape[3]} "
                f"numbers, but this cache holds {slab.keys.shape[1]} of {slab.keys.shape[3]}. "
                "Make a new cache for this model."
            )

    # --- a step that an engine runs

    def held(self) -> HeldPart:
        """Return what a step of constant shape reads and writes; the layer holds tokens already."""
        assert self.state.slab is not None
        assert self.params is not None
        pipe, positions = self.spec.pipe, self.spec.positions
        slots = DecodeSlots.of(
            self.state.slab,
            two_weights=pipe.two_weights,
            unasked=self.spec.chunk - self.spec.keeps_queries,
            window=positions.window,
        )
        return HeldPart(slots, self.params, positions.rotary, self.spec.heads)

    def commit_step(self, segment: Segment, largest: Tensor | None) -> None:
        """Note that an engine has stored and answered a segment, as `attend` would have.

        `largest` is the largest absolute number among each row's keys and values [batch]; None if
        all are known to be finite.
        """
        assert self.params is not None
        self.unchecked = [] if largest is None else [largest]
        self._note_spans(segment)
        waits = segment.due or largest is not None
        self._pending = Pending(segment, self.params) if waits else None

    # --- the end of a forward

    def commit(self) -> None:
        """Finish a successful forward: fold the rows whose tail is full."""
        self._commit()
        self._backup = None

    def take_fold_seconds(self) -> float:
        """Return the seconds spent folding since the last call."""
        seconds, self._fold_seconds = self._fold_seconds, 0.0
        return seconds

    def _commit(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None or self.state.slab is None or not pending.segment.due:
            return
        start = time.perf_counter()
        fold_rows(self.state, pending)
        self._fold_seconds += time.perf_counter() - start

    def _commit_early(self) -> None:
        """Commit a segment before the forward has ended."""
        if self._backup is None and self.state.slab is not None:
            lengths = [list(row) for row in self.state.lengths]
            self._backup = Backup(self.state.slab.copy(), lengths)
        self._commit()

    def undo(self) -> None:
        """Restore the state from before a forward that failed."""
        self._pending = None
        backup, self._backup = self._backup, None
        if backup is not None:
            self.state.slab, self.state.lengths = backup.slab, backup.lengths
            if self.state.slab is not None:
                self.state.refresh()
        if self.state.slab is not None:
            # A step that reads the whole slab would spread a NaN even from a slot of weight zero.
            for row, used in enumerate(self.state.used):
                self.state.slab.scrub(row, used, used + self.spec.chunk)

    def undo_rows(self, rows: list[int]) -> None:
        """Remove the tokens of some rows from a step that has not been committed."""
        if self._pending is None or self.state.slab is None:
            return
        segment = self._pending.segment
        ends = self.state.ends(segment.waiting)
        for row in rows:
            self.state.slab.scrub(row, ends[row], ends[row] + 1)
        self._pending = Pending(segment.without(rows), self._pending.params)

    # --- segments

    def _attend_step(self, new: NewTokens, segment: Segment) -> Tensor:
        """Store one token of each row in the slot that waits for it, and attend.

        A row without a token writes too; its next token overwrites what was written.
        """
        slab, spec = self.state.slab, self.spec
        assert slab is not None
        queries, keys, values, params = new.rotated(spec, slab, segment)
        ends = segment.ends(tuple(self.state.ends(segment.waiting)))
        kv_heads = keys.shape[1]
        if ends.in_step:
            slab.append(keys, values, ends.stop - 1)
            bias = mask_of_piece(
                spec.positions, slab, segment, ends.stop, queries.dtype, in_step=True
            )
        else:
            slab.append_each(keys, values, ends.lines(kv_heads, slab.keys.shape[2]))
            bias = mask_of_step(spec.positions, slab, segment, ends, queries.dtype)
        if slab.queries is not None:
            places = segment.ends(tuple(map(spec.query_place, segment.waiting)))
            if places.in_step:
                slab.store_queries(queries, places.stop - 1)
            else:
                lines = places.lines(kv_heads, slab.queries.shape[2])
                put_lines(slab.queries, merge_groups(queries), lines)
        self._note_spans(segment)
        self._pending = Pending(segment, params)
        slots = slab.attended(self.state.first, ends.stop, plain=self.state.plain)
        return compute_attention(queries, slots, params, bias).answers

    def _attend_piece(self, new: NewTokens, segment: Segment, last: Segment) -> Tensor:
        """Store one segment of a forward in the tail, and attend; `last` is the final segment."""
        if self._pending is not None:
            self._commit_early()
        slab, spec = self.state.slab, self.spec
        assert slab is not None
        queries, keys, values, params = new.rotated(spec, slab, segment)
        ends = self.state.ends(segment.waiting)
        in_step = segment.in_step and len(set(ends)) == 1
        if in_step:
            slab.append(keys, values, ends[0])
        else:
            rows, places, _ = segment.entries
            prefix = torch.tensor(self.state.used, device=keys.device)
            slab.append_at(keys, values, rows, prefix[rows] + segment.tail_places, places)
        stop = max(end + n for end, n in zip(ends, segment.counts, strict=True))
        bias = mask_of_piece(spec.positions, slab, segment, stop, queries.dtype, in_step=in_step)
        store_queries(slab, spec, queries, segment)
        self._note_spans(segment)
        # The last segment folds after all layers have answered. Until then no layer keeps its
        # shares, queries times slots in number. Pools read quantized slots in another order.
        observes = 0 < spec.pipe.needs_queries <= segment.width and slab.quantized is None
        observes = observes and not (segment is last and spec.pipe.needs_shares)
        observe: Observe = ""
        if in_step and segment.width == spec.chunk and (observes or spec.pipe.needs_mass):
            observe = "shares" if spec.pipe.needs_shares else "received"
        slots = slab.attended(self.state.first, stop, plain=self.state.plain and in_step)
        causal = in_step and spec.positions.window is None and spec.positions.alibi is None
        result = compute_attention(queries, slots, params, bias, causal=causal, observe=observe)
        mass = observed = None
        if result.received is not None:
            mass = result.mass
            if observes:
                observed = result._replace(shares=None) if segment is last else result
        self._pending = Pending(segment, params, mass=mass, observed=observed)
        return result.answers

    def _attend_together(self, new: NewTokens, plan: ForwardPlan) -> Tensor | None:
        """Attend all segments of a forward in one call, and fold once; None if that cannot be."""
        queries, keys, values, params = new
        kernel = kernels.attend_window(queries, values)
        plain = params.softcap is None and params.sinks is None
        if kernel is None or not (plain and self.state.plain) or self._pending is not None:
            return None
        piece = WindowPiece.of(self.state, keys, values, plan.segments)
        if piece is None:
            return None
        answers = piece.answer(kernel, queries, params)
        segment, arrivals = piece.folded()
        self._pending = Pending(segment, params, arrivals)
        self._commit_early()
        rest = piece.rest()
        if rest is not None:
            assert self.state.slab is not None
            self.state.slab.append(*rest, self.state.used[0])
            self._pending = Pending(plan.segments[-1], params)
        return answers

    def reread(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        params: AttentionParams,
        plan: ForwardPlan,
        rows: Sequence[int],
    ) -> Tensor:
        """Answer a second reading of the last tokens of `rows`, and keep what they were given.

        Arguments as for `attend`; the tokens take no slot, and other rows are not answered.
        """
        batch, heads, length, _ = queries.shape
        queries = queries.view(batch, keys.shape[1], heads // keys.shape[1], length, -1)
        new, segment = NewTokens(queries, keys, values, params), plan.segments[0]
        out = values.new_zeros((*queries.shape[:4], values.shape[3]))
        for row in rows:
            out[row] = read_again(self.state, row, new.row(row), segment.of_row(row))[0]
        return out.flatten(1, 2)

    def _note_spans(self, segment: Segment) -> None:
        """Store the places of a segment's tokens on three axes, for the folds that move them."""
        slab = self.state.slab
        if slab is None or slab.span is None:
            return
        ends = self.state.ends(segment.waiting)
        if segment.in_step and len(set(ends)) == 1:
            slab.span.narrow(2, ends[0], segment.width).copy_(segment.spans[:, None])
            return
        rows, places, _ = segment.entries
        slots = torch.tensor(ends, device=slab.span.device)[rows] + places
        slab.span[rows, :, slots] = segment.spans[rows, places][:, None]

    def _attend_exactly(self, new: NewTokens, segment: Segment, answers: bool) -> Tensor:
        """Attend causally over a whole prompt, then fold at once: only one layer at a time holds
        the prompt.
        """
        assert self.state.slab is not None
        new = new.rotated(self.spec, self.state.slab, segment)
        out, arrivals = attend_prompt(self.spec, new, segment, answers)
        store_last_queries(self.state.slab, self.spec, new.queries, segment)
        self._pending = Pending(segment, new.params, arrivals)
        self._commit_early()
        return out


class RowsNotFinite(Exception):
    """Keys or values of some rows are not finite; the forward must be repeated without them.

    Attributes:
        layer: the layer that found them.
        columns: by row, the first column whose key or value is not finite.
    """

    def __init__(self, layer: int, columns: dict[int, int]) -> None:
        super().__init__(f"layer {layer}, rows {sorted(columns)}")
        self.layer = layer
        self.columns = columns


def first_unfinite(finite: Tensor, plan: ForwardPlan) -> dict[int, int]:
    """Find each row's first token in a column where `finite` [batch, length] is false."""
    found: dict[int, int] = {}
    wrong = (~finite).tolist()
    for segment in plan.segments:
        columns = segment.columns.tolist()
        for row, count in enumerate(segment.counts):
            bad = [column for column in columns[row][:count] if wrong[row][column]]
            if bad and row not in found:
                found[row] = bad[0]
    return found


def finite_columns(keys: Tensor, values: Tensor) -> Tensor:
    """Return which columns have finite keys and values in all heads [batch, length], bool."""
    finite = keys.isfinite().all(dim=3) & values.isfinite().all(dim=3)
    return finite.all(dim=1)
