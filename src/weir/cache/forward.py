"""One call of the model through all layers: begun, attended, and finished or undone.

A call takes effect when it has finished; one that fails leaves no trace. If keys of some rows are
not finite, the call is finished, or repeated, without these rows.

Where KV heads of a layer have different pipes, heads with the same one are a `Layer` of their own:
queries, keys and values are shared out by heads, and the answers are put back in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from weir.cache.layer import (
    DecodeSlots,
    Layer,
    LayerState,
    RowsNotFinite,
)
from weir.cache.plan import BegunForward, ForwardPlan, Rows, Segment
from weir.errors import NotFiniteError, WeirError
from weir.slab import AttentionParams, Rotary, Slab, rotation_tables

Answer = Callable[[Tensor, Tensor, Tensor, AttentionParams], Tensor]
"""Attention of a part: queries, keys, values and parameters to answers [batch, heads, ...]."""


@dataclass(frozen=True)
class HeadSplit:
    """Assignment of a layer's KV heads to its parts.

    Attributes:
        heads: of each part, its KV heads [n], int64.
        order: the place of each KV head among those of all parts [kv_heads], int64.
    """

    heads: tuple[Tensor, ...]
    order: Tensor

    def on(self, device: torch.device) -> HeadSplit:
        """Return the same on a device."""
        if self.order.device == device:
            return self
        return HeadSplit(tuple(t.to(device) for t in self.heads), self.order.to(device))

    def answer(
        self,
        parts: Sequence[Answer],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        params: AttentionParams,
    ) -> Tensor:
        """Let each part answer the queries of its heads; arguments as for `Layer.attend`."""
        queries = queries.unflatten(1, (keys.shape[1], -1))
        answers = []
        for part, heads in zip(parts, self.heads, strict=True):
            q, k, v = (t.index_select(1, heads) for t in (queries, keys, values))
            own = params
            if params.sinks is not None:
                own = replace(params, sinks=params.sinks.index_select(0, heads))
            answers.append(part(q.flatten(1, 2), k, v, own).unflatten(1, q.shape[1:3]))
        return torch.cat(answers, dim=1).index_select(1, self.order).flatten(1, 2)


class LayerParts:
    """The parts of one layer of the model, which attend as one.

    Attributes:
        parts: for each pipe, the stream of the heads that have it.
        split: which heads each of them holds; None if there is one.
    """

    def __init__(self, parts: Sequence[Layer]) -> None:
        self.parts = parts
        self.split: HeadSplit | None = None
        if len(parts) > 1:
            heads = [torch.tensor(part.spec.heads) for part in parts]
            self.split = HeadSplit(tuple(heads), torch.cat(heads).argsort())

    def answer(
        self,
        method: Callable[..., Tensor],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        params: AttentionParams,
        *more: Any,
    ) -> Tensor:
        """Call `Layer.attend` or `Layer.reread` of the whole layer."""
        if self.split is None:
            return method(self.parts[0], queries, keys, values, params, *more)
        if keys.shape[1] != len(self.split.order):
            raise WeirError(
                f"layer {self.parts[0].spec.index} makes keys of {keys.shape[1]} heads, and this "
                f"cache holds {len(self.split.order)}; a cache serves one model only"
            )
        self.split = self.split.on(keys.device)
        calls = [partial(_call, method, part, more) for part in self.parts]
        return self.split.answer(calls, queries, keys, values, params)


def _call(method: Callable[..., Tensor], part: Layer, more: Sequence[Any], *given: Any) -> Tensor:
    return method(part, *given, *more)


@dataclass(frozen=True)
class Folded:
    """The folds of one forward, passed to `StreamingCache.on_fold`.

    Attributes:
        rows: the rows that folded, in all layers.
        seconds: time that all layers took to fold; on an accelerator, only the time to launch.
    """

    rows: tuple[int, ...]
    seconds: float


class LayerStack(list[Layer]):
    """The layers of a cache, and what calls change beside their slots.

    A layer of the model whose KV heads have several pipes is several layers here.

    Attributes:
        by_index: the layer or layers of each layer of the model.
        moves_on_axes: whether tokens of a layer move on three axes, so that it keeps their places.
        rows: the progress of each row.
        broken: whether a call was interrupted during a fold.
        failed: by row, why its tokens of the last forward were refused.
        folded: the folds of the last forward, until `on_fold` is called.
        again: by row, the ids of a chunk that has folded and is to be read a second time.
        program: the native step over these slots; None for none yet.
        refused: what the last step over these slots was refused for, and why; None if it was not.
        asked: the sizes of the last step over these slots that was to be compiled by
            `torch.compile`; None before it.
    """

    rows: Rows
    broken: bool
    failed: dict[int, WeirError]
    folded: Folded | None
    again: dict[int, list[int]]
    program: Any = None
    refused: tuple[Any, str] | None = None
    asked: Hashable = None
    _layout: StepLayout | None = None

    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__(layers)
        parts = groupby(self, key=lambda layer: layer.spec.index)
        self.by_index = [LayerParts(tuple(each)) for _, each in parts]
        self.moves_on_axes = any(layer.spec.moves_on_axes for layer in self)

    def reset(self) -> None:
        """Forget all rows."""
        for layer in self:
            layer.reset()
        self.rows = Rows()
        self.broken, self.failed, self.folded, self.again = False, {}, None, {}

    def why_not_constant(self) -> str | None:
        """Return why steps over these layers cannot be of constant shape; None if they can."""
        reasons = (DecodeSlots.why_not(layer.spec) for layer in self)
        return next((reason for reason in reasons if reason is not None), None)

    def step_layout(self) -> StepLayout | None:
        """Return where native steps read and write; None while a layer has attended to nothing."""
        version = LayerState.version
        if self._layout is None or self._layout.version != version:
            slabs = [layer.state.slab for layer in self if layer.params is not None]
            whole = [slab for slab in slabs if slab is not None]
            if len(whole) < len(self):
                return None
            spans = [[layer.state.first, *layer.state.used] for layer in self]
            self._layout = StepLayout(version, whole, np.array(spans))
        return self._layout


@dataclass(frozen=True, eq=False)
class StepLayout:
    """The slots of a cache's layers, between two folds.

    Attributes:
        version: of all layers (`LayerState.version`).
        slabs: of each part of a layer.
        spans: of each part the first slot that is read, and each row's first slot of the tail
            [parts, 1 + batch], int64.
    """

    version: int
    slabs: list[Slab]
    spans: np.ndarray


class Forward:
    """One call through all layers.

    Attributes:
        stack: the layers and rows of the call.
        given: the decoder's arguments by name.
        plan: the segments of the call.
    """

    _stored = False
    """Whether a step has stored all there is, and no layer has anything to check or fold."""

    def __init__(
        self,
        stack: LayerStack,
        given: dict[str, Any],
        begun: BegunForward,
        rotaries: dict[str | None, Rotary],
        begin: Callable[[dict[str, Any], tuple[int, ...]], Forward],
        without: tuple[int, ...] = (),
    ) -> None:
        self.given = given if begun.ids is None else {**given, "input_ids": begun.ids}
        self.plan: ForwardPlan = begun.plan
        self.stack = stack
        self._begin = begin
        self._begun = begun
        self._rotaries = rotaries
        self._without = without

    # --- during the call: used by the hooks

    def rotations(
        self, kind: str | None, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines [batch or 1, length, width], float32, for a layer type at the
        positions of the call; None where no layer rotates.
        """
        return rotation_tables(self._rotaries, kind, self.plan.positions.to(device), width)

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """Store new keys and values [batch, kv_heads, length, dim] of one layer, and answer the
        queries [batch, heads, length, key_dim].
        """
        parts, plan = self.stack.by_index[layer], self.plan.on(queries.device)
        if not torch.is_grad_enabled():  # cheaper than a second no_grad
            return parts.answer(Layer.attend, queries, keys, values, params, plan)
        with torch.no_grad():
            out = parts.answer(Layer.attend, queries, keys, values, params, plan)
        refused: Tensor = _NoGradient.apply(out, queries, keys, values)
        return refused

    def step_rows(self) -> StepRows | None:
        """Return the rows of a native step; None if the call cannot be one."""
        if not self.plan.step or torch.is_grad_enabled():
            return None
        (segment,) = self.plan.segments
        if segment.pictured is not None or segment.device.type != "cpu":
            return None
        layout = self.stack.step_layout()
        return None if layout is None else StepRows(self.stack, layout, segment)

    def step(self) -> Step | None:
        """Return the cache of a compiled step; None if the call cannot be one."""
        if not self.plan.step or torch.is_grad_enabled():
            return None
        (segment,) = self.plan.segments
        if segment.pictured is not None:
            return None
        places = segment.start if segment.drift is None else segment.start + segment.drift
        slots = []
        for layer in self.stack:
            decode = layer.decode_slots()
            if decode is None or decode.keys.device != segment.device:
                return None
            slots.append(decode)
        ends = [layer.state.ends(segment.waiting) for layer in self.stack]
        return Step(
            self.stack.by_index,
            slots,
            torch.tensor(ends, device=segment.device),
            torch.tensor(segment.waiting, device=segment.device),
            places[:, None],
            self._rotaries,
        )

    def commit_step(self, step: Step | StepRows) -> None:
        """Note that the compiled step has run."""
        (segment,) = self.plan.segments
        # One check of all layers; one a layer only if it fails.
        whole = math.isfinite(step.largest.amax().item())
        self._stored = whole and not segment.due and not self.stack.moves_on_axes
        if self._stored:
            return
        largest = step.largest
        if isinstance(step, StepRows):
            largest = largest.amax(2)
        per_layer = [None] * len(self.stack) if whole else largest
        for layer, largest in zip(self.stack, per_layer, strict=True):
            layer.commit_step(segment, largest)

    # --- the end of the call

    def finish(self) -> Forward | None:
        """Finish a successful call: keep its tokens, and fold full tails.

        Returns the call to repeat, without the rows whose keys or values are not finite; None if
        there is nothing to repeat. Raises NotFiniteError, and undoes the call, if that is every
        row.
        """
        failed = {} if self._stored else self._unfinite()
        if failed and not self.plan.step:
            return self._again(failed)
        stack = self.stack
        if failed:
            for layer in stack:
                layer.undo_rows(sorted(failed))
            failed = {row: at for row, at in failed.items() if self.plan.segments[0].counts[row]}
            if failed and len(failed) == sum(self.plan.segments[0].counts):
                self._undo()
                raise self._record_failures(failed) from None
        if not self._stored:
            self._commit()
        stack.again = {
            row: ids for row, ids in self._begun.again.items() if row not in stack.failed | failed
        }
        stack.rows = self._begun.after.keeping(stack.rows, failed) if failed else self._begun.after
        stack.failed |= self._begun.refused
        if failed:
            self._record_failures(failed)
        return None

    def abandon(self, error: BaseException) -> Forward | None:
        """Undo a call that failed.

        Returns the call to repeat, without the rows that caused the error; None if no row did.
        Raises NotFiniteError if no row is left.
        """
        if isinstance(error, RowsNotFinite):
            return self._again({row: (error.layer, c) for row, c in error.columns.items()})
        self._undo()
        return None

    def _again(self, failed: dict[int, tuple[int, int]]) -> Forward:
        """Return the call without the failed rows; raise if no other row has tokens."""
        self._undo()
        error = self._record_failures(failed)
        if self._with_tokens() <= set(failed):
            raise error from None
        # Ids out of range are already replaced in `given`: begin would not refuse their rows.
        refused = self._begun.refused
        self.stack.failed |= refused
        return self._begin(self.given, (*self._without, *refused, *failed))

    def _with_tokens(self) -> set[int]:
        """Return the rows that have a token in this call."""
        return {row for segment in self.plan.segments for row, n in enumerate(segment.counts) if n}

    def _commit(self) -> None:
        stack = self.stack
        due = tuple(sorted({row for segment in self.plan.segments for row in segment.due}))
        # Until the last layer has folded, an interruption leaves layers that do not fit together.
        stack.broken = True
        for layer in stack:
            layer.commit()
        stack.broken = False
        if due:
            seconds = sum(layer.take_fold_seconds() for layer in stack)
            stack.folded = Folded(due, seconds)

    def _undo(self) -> None:
        for layer in self.stack:
            layer.undo()

    def _unfinite(self) -> dict[int, tuple[int, int]]:
        """Find the first layer and column of each row that are not finite; {} if all are."""
        unchecked = [t for layer in self.stack for t in layer.unchecked]
        if not unchecked:
            return {}
        # One check for all of them, since a check waits for the accelerator.
        device = unchecked[0].device
        whole = torch.cat([t.detach().flatten().to(device) for t in unchecked])
        if device.type == "cpu" and whole.is_floating_point():
            # The minimum and the maximum are enough, and cheaper: NaN makes both NaN.
            fine = all(map(math.isfinite, whole.aminmax()))
        else:
            fine = bool((whole if whole.dtype == torch.bool else whole.isfinite()).all())
        if fine:
            return {}
        found: dict[int, tuple[int, int]] = {}
        for layer in self.stack:
            for row, column in layer.unfinite(self.plan).items():
                found.setdefault(row, (layer.spec.index, column))
        return found

    def _record_failures(self, failed: dict[int, tuple[int, int]]) -> WeirError:
        """Record in the cache which rows failed; returns the first row's error, to be raised."""
        others = bool(self._with_tokens() - set(failed))
        for row, (layer, column) in failed.items():
            self.stack.failed[row] = self._make_error(row, layer, column, others=others)
        # A new error: one that the cache holds would, once raised, keep the cache alive.
        return self._make_error(min(failed), *failed[min(failed)])

    def _make_error(
        self, row: int, layer: int, column: int, *, others: bool = False
    ) -> NotFiniteError:
        ids = self.given.get("input_ids")
        token = None if ids is None else int(ids[row, column])
        batch = len(self.plan.segments[0].counts)
        return NotFiniteError(
            layer, row=row if batch > 1 else None, place=column, token=token, others=others
        )


class SecondReading(Forward):
    """A call that repeats a chunk of some rows, and of which only their tokens' scores stay.

    Attributes:
        rows: the rows that repeat something.
    """

    rows: tuple[int, ...] = ()

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """Compute one layer's attention for the repeated tokens, which are not stored."""
        plan = self.plan.on(queries.device)
        parts = self.stack.by_index[layer]
        with torch.no_grad():
            return parts.answer(Layer.reread, queries, keys, values, params, plan, self.rows)

    def step(self) -> None:
        """Return None: a second reading is no step."""

    def step_rows(self) -> None:
        """Return None, as `step`."""

    def finish(self) -> None:
        """Keep nothing: the slots are as they were."""

    def abandon(self, error: BaseException) -> None:
        """Undo nothing: nothing was stored."""


class _NoGradient(torch.autograd.Function):
    """Refusal of gradients through attention, whose slots are written in place."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *given: Tensor) -> Tensor:
        """Return `out` unchanged, so that its gradient would pass through `backward`."""
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuse the gradient (WeirError)."""
        raise WeirError(
            "there are no gradients through a StreamingCache: its slots are rewritten in place; "
            "train without a cache, past_key_values=None and use_cache=False"
        )


class StepRows:
    """The rows of a native step of one token each, and the layers that hold their slots.

    Attributes:
        stack: the layers; its `program` is left to the step.
        slabs: the slots of each part, which are others after a restored session or more rows.
        spans: of each part of a layer the first slot that is read, and the slot of each row's
            token [parts, 1 + batch], int64.
        waiting: tokens in each row's tail before it [batch], int64.
        places: each row's place in the stream [batch], int64.
        busy: the rows that have a token.
        largest: output; the largest absolute key or value of each part of a layer, row and head
            [parts, batch, heads], float32. None until the step has run.
    """

    largest: Any = None

    def __init__(self, stack: LayerStack, layout: StepLayout, segment: Segment) -> None:
        self.stack, self.slabs = stack, layout.slabs
        self.spans, self.waiting = layout.spans.copy(), np.array(segment.waiting)
        self.spans[:, 1:] += self.waiting
        self.places = np.array(segment.seen) + segment.origin
        self.busy = [row for row, count in enumerate(segment.counts) if count]
        if segment.drift is not None:
            self.places += segment.drift.numpy()

    def held(self) -> list[list[HeldPart]] | None:
        """Return what each layer's parts hold; None where a step of constant shape cannot be."""
        found = [[_held_part(part) for part in layer.parts] for layer in self.stack.by_index]
        whole = [[part for part in parts if part is not None] for parts in found]
        return whole if whole == found else None


@dataclass(frozen=True, eq=False)
class HeldPart:
    """A part of a layer, as a native step reads it.

    Attributes:
        slots: of its KV heads.
        params: how it attends.
        rotary: how queries and keys are rotated; None if they are not.
        heads: its KV heads among those of the layer; None for all.
    """

    slots: DecodeSlots
    params: AttentionParams
    rotary: Rotary | None
    heads: tuple[int, ...] | None


def _held_part(part: Layer) -> HeldPart | None:
    slots, params = part.decode_slots(), part.params
    if slots is None or params is None:
        return None
    return HeldPart(slots, params, part.spec.positions.rotary, part.spec.heads)


class LayerStep:
    """The cache in one layer of a compiled forward of one token a row.

    Attributes:
        slots: of each part of the layer.
        ends: the slot of each row's token [batch], int64, of each part.
        waiting: tokens in each row's tail before it [batch], int64.
        largest: output; the largest absolute key or value of each row [batch], float32, of each
            part.
        split: which heads each part holds; None if there is one part.
    """

    def __init__(
        self,
        slots: Sequence[DecodeSlots],
        ends: Tensor,
        waiting: Tensor,
        largest: Tensor,
        split: HeadSplit | None,
    ) -> None:
        self.slots = slots
        self.ends = ends.unbind()
        self.waiting = waiting
        self.largest = largest.unbind()
        self.split = None if split is None else split.on(waiting.device)

    @property
    def sizes(self) -> Hashable:
        """The key of the layer's slots: shapes and types, each with a program of its own."""
        return tuple(part.sizes for part in self.slots)

    def tensors(self) -> list[Tensor]:
        """Return all that the layer's program may read or write."""
        held = [t for part in self.slots for t in part.tensors()]
        split = () if self.split is None else (*self.split.heads, self.split.order)
        return [*held, *self.ends, self.waiting, *self.largest, *split]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensor]:
        """Pass new keys and values on to weir's attention; the layer's number is not read."""
        return (self, None, key_states), value_states

    def attend(
        self, layer: None, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams
    ) -> Tensor:
        """Compute attention for one token a row; see `Forward.attend`."""
        calls = [
            partial(part.attend, ends=ends, waiting=self.waiting, largest=largest)
            for part, ends, largest in zip(self.slots, self.ends, self.largest, strict=True)
        ]
        if self.split is None:
            return calls[0](queries, keys, values, params)
        return self.split.answer(calls, queries, keys, values, params)


class Step(Cache):
    """The cache in a compiled forward of one token a row.

    Attributes:
        layers: the cache in each layer.
        waiting: tokens in each row's tail before it [batch], int64.
        positions: each row's place in the stream [batch or 1, 1], int64.
        rotaries: the rotary embedding of each type of layers that has one.
        largest: output; the largest absolute key or value of each part of a layer and row
            [parts, batch], float32.
    """

    def __init__(
        self,
        layers: Sequence[LayerParts],
        slots: list[DecodeSlots],
        ends: Tensor,
        waiting: Tensor,
        positions: Tensor,
        rotaries: dict[str | None, Rotary],
    ) -> None:
        super().__init__(layers=[])
        self.layers: list[Any] = []
        self.waiting = waiting
        self.positions = positions
        self.rotaries = rotaries
        self.largest = torch.zeros(ends.shape, device=ends.device)
        stop = 0
        for layer in layers:
            start, stop = stop, stop + len(layer.parts)
            part = slots[start:stop], ends[start:stop], waiting, self.largest[start:stop]
            self.layers.append(LayerStep(*part, layer.split))

    @property
    def sizes(self) -> tuple[Hashable, ...]:
        """The key of each layer's slots."""
        return tuple(layer.sizes for layer in self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions come from weir."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return sizes for a mask that is never read."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0, for a mask that is never read."""
        return 0

    def rotations(
        self, kind: str | None, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines at the rows' places; see `Forward.rotations`."""
        return rotation_tables(self.rotaries, kind, self.positions, width)
