"""One layer's stream: append, attend, and commit when a forward has succeeded.

The changes of the current forward are in the layer's `Transaction`, which ends with `commit` or
`abandon`.
"""

from __future__ import annotations

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
    store_last_queries,
    store_queries,
)
from weir.cache.layer.fold import Pending
from weir.cache.layer.layer_state import LayerSpec, LayerState
from weir.cache.layer.transaction import Transaction
from weir.cache.plan import ForwardPlan, Segment, plan_forward
from weir.errors import WeirError, in_words
from weir.slab import (
    AttentionParams,
    DecodeSlots,
    Heads,
    HeldPart,
    Observe,
    compute_attention,
    merge_groups,
    put_lines,
)


class Layer:
    """The stream of one layer, or of some of its KV heads: its slots, and the forward in progress.

    Attributes:
        spec: the layer's fixed facts.
        state: the slots, and how each row of the batch uses them.
        params: the parameters of the last attention call; None before the first token. Engines read
            them before their steps, and `commit_step` passes them on to the fold.
        running: the changes of the forward in progress; empty between forwards.
    """

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.state = LayerState(spec)
        self.reset()

    def reset(self) -> None:
        """Forget everything and free the slots."""
        self.state.reset()
        self.params: AttentionParams | None = None
        self.running = Transaction(self.state)
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
        """Call `attend` and then `commit`, for rows that are in step: all get the same number of
        tokens, and their tails are equally full.

        `seen` tokens came before, and `waiting` of them are in the tail. `prefill` attends to all
        tokens exactly and folds them once; without `answers`, it folds them and returns zeros.
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
        """Append new tokens and answer their queries. Call `commit` or `abandon` afterwards.

        Args:
            queries: [batch, heads, length, key_dim], unrotated unless `spec.positions.placed`.
            keys, values: [batch, kv_heads, length, dim], keys rotated as the queries are.
            params: the parameters of the layer's attention.
            plan: the segments of the forward.
            answers: whether to answer the queries of a whole prompt; other queries are always
                answered.

        Raises:
            RowsNotFinite: keys or values are infinite or NaN. In a step, and on an accelerator,
                this is checked at the end (`Transaction.unfinite`).
            WeirError: keys differ in dtype, device or shape from earlier keys.
        """
        self.params = params
        batch, heads, length, _ = queries.shape
        kv_heads = keys.shape[1]
        queries = queries.view(batch, kv_heads, heads // kv_heads, length, -1)
        if not plan.segments:
            return values.new_zeros((batch, heads, length, values.shape[3]))
        self.running.check_finite(keys, values, plan)
        if self.state.slab is None:
            self.running.note_new_slots()
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

    def _check_like(self, keys: Tensor, values: Tensor) -> None:
        """Refuse keys whose dtype, device or shape differs from that of the existing slots."""
        slab = self.state.slab
        assert slab is not None
        if keys.dtype != slab.keys.dtype or keys.device != slab.keys.device:
            was = f"{str(slab.keys.dtype).removeprefix('torch.')} on {slab.keys.device}"
            now = f"{str(keys.dtype).removeprefix('torch.')} on {keys.device}"
            raise WeirError(
                f"the model was {was} when this cache got its first tokens and is {now} now. Move "
                "it back, or make a new cache."
            )
        if keys.shape[1] != slab.keys.shape[1] or keys.shape[3] != slab.keys.shape[3]:
            raise WeirError(
                f"layer {self.spec.index} makes keys for {in_words(keys.shape[1], 'head')}, with "
                f"{in_words(keys.shape[3], 'number')} in each, but this cache holds keys for "
                f"{in_words(slab.keys.shape[1], 'head')}, with {slab.keys.shape[3]} in each. "
                "Make a new cache for this model."
            )

    # --- a step that an engine runs

    def held(self) -> HeldPart:
        """Return what a step of constant shape reads and writes; the layer must already hold
        tokens.
        """
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
        self.running.unchecked = [] if largest is None else [largest]
        self._note_spans(segment)
        waits = segment.due or largest is not None
        self.running.pending = Pending(segment, self.params) if waits else None

    # --- the end of a forward

    def commit(self) -> None:
        """Finish a successful forward: fold the rows whose tail is full."""
        self.running.commit()
        self._fold_seconds += self.running.fold_seconds
        self.running = Transaction(self.state)

    def abandon(self) -> None:
        """Restore the state from before a forward that failed."""
        self.running.abandon()
        self.running = Transaction(self.state)

    def take_fold_seconds(self) -> float:
        """Return the seconds spent folding since this method was last called."""
        seconds, self._fold_seconds = self._fold_seconds, 0.0
        return seconds

    # --- segments

    def _attend_step(self, new: NewTokens, segment: Segment) -> Tensor:
        """Store one token of each row in the slot that waits for it, and attend.

        A row without a token also writes; its next token overwrites that.
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
        self.running.pending = Pending(segment, params)
        slots = slab.attended(self.state.first, ends.stop, plain=self.state.plain)
        return compute_attention(queries, slots, params, bias).answers

    def _attend_piece(self, new: NewTokens, segment: Segment, last: Segment) -> Tensor:
        """Store one segment of a forward in the tail, and attend; `last` is the final segment."""
        if self.running.pending is not None:
            self.running.fold_early()
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
        # `observes` says whether the fold can use the attention that is computed here, so that it
        # need not be computed again. It cannot if pools need attention shares (one number for each
        # query and slot) of the last segment: its fold runs after all layers have answered, and
        # until then all layers would have to keep their shares. Nor can it with quantized slots:
        # attention reads them before the exact slots, but pools get the slots in another order.
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
        self.running.pending = Pending(segment, params, mass=mass, observed=observed)
        return result.answers

    def _attend_together(self, new: NewTokens, plan: ForwardPlan) -> Tensor | None:
        """Attend all segments of a forward in one call, and fold once; None if that is not
        possible.
        """
        queries, keys, values, params = new
        kernel = kernels.attend_window(queries, values)
        plain = params.softcap is None and params.sinks is None
        if kernel is None or not (plain and self.state.plain) or self.running.pending is not None:
            return None
        piece = WindowPiece.of(self.state, keys, values, plan.segments)
        if piece is None:
            return None
        answers = piece.run_kernel(kernel, queries, params)
        segment, arrivals = piece.folded()
        self.running.pending = Pending(segment, params, arrivals)
        self.running.fold_early()
        rest = piece.rest()
        if rest is not None:
            assert self.state.slab is not None
            self.state.slab.append(*rest, self.state.used[0])
            self.running.pending = Pending(plan.segments[-1], params)
        return answers

    def _note_spans(self, segment: Segment) -> None:
        """Store `Slots.span` of a segment's tokens, for folds, if the slab has a buffer for it."""
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
        """Attend causally over a whole prompt, and fold immediately, so that only one layer at a
        time holds the prompt.
        """
        assert self.state.slab is not None
        new = new.rotated(self.spec, self.state.slab, segment)
        out, arrivals = attend_prompt(self.spec, new, segment, answers)
        store_last_queries(self.state.slab, self.spec, new.queries, segment)
        self.running.pending = Pending(segment, new.params, arrivals)
        self.running.fold_early()
        return out
