"""One call of the model through all layers: begun, attended, and finished or undone.

A call takes effect when it has finished. A call that fails changes no row, unless it is interrupted
while layers fold: then the cache must be reset (`Outcome.broken`). If keys or values of some rows
are not finite, the call is finished, or repeated, without these rows.

If KV heads of a layer have different pipes, the heads of each pipe form a separate `Layer`.
Queries, keys and values are distributed by head, and the answers are put back in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from weir.cache.layer import (
    Layer,
    LayerState,
    RowsNotFinite,
)
from weir.cache.plan import BegunForward, ForwardPlan, Rows, Segment
from weir.errors import NotFiniteError, WeirError, in_words
from weir.models import Given
from weir.slab import (
    AttentionParams,
    HeadSplit,
    HeldPart,
    Rotary,
    Step,
    StepSlots,
    rotation_tables,
)


class LayerParts:
    """The parts of one layer of the model, which attend as one.

    Attributes:
        parts: for each pipe, the stream of the heads that have it.
        split: which heads each part holds; None if there is only one part.
    """

    def __init__(self, parts: Sequence[Layer]) -> None:
        self.parts = parts
        self.split = HeadSplit.of([part.spec.heads for part in parts], torch.device("cpu"))

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        params: AttentionParams,
        plan: ForwardPlan,
    ) -> Tensor:
        """Call `Layer.attend` of each part, and join the answers."""
        if self.split is None:
            return self.parts[0].attend(queries, keys, values, params, plan)
        if keys.shape[1] != len(self.split.order):
            raise WeirError(
                f"layer {self.parts[0].spec.index} makes keys of "
                f"{in_words(keys.shape[1], 'head')}, but this "
                f"cache holds {len(self.split.order)}. Make a new cache for this model."
            )
        self.split = self.split.on(keys.device)
        calls = [partial(part.attend, plan=plan) for part in self.parts]
        return self.split.join_answers(calls, queries, keys, values, params)


@dataclass(frozen=True)
class Folded:
    """The folds of one forward, passed to `StreamingCache.on_fold`.

    Attributes:
        rows: the rows that folded, in all layers.
        seconds: time that all layers took to fold; on an accelerator, only the time to launch.
    """

    rows: tuple[int, ...]
    seconds: float


@dataclass
class Outcome:
    """The outcome of the last forward, or of the running one so far.

    Attributes:
        failed: by row, why its tokens were refused.
        folded: the folds of the forward, until `on_fold` is called.
        broken: whether the forward is folding, or was interrupted during a fold.
    """

    failed: dict[int, WeirError] = field(default_factory=dict)
    folded: Folded | None = None
    broken: bool = False


class LayerStack(list[Layer]):
    """The layers of a cache, and the state that calls change in addition to the slots.

    A layer of the model whose KV heads have several pipes counts as several layers here.

    Attributes:
        by_index: for each layer of the model, its parts.
        moves_on_axes: whether some layer moves tokens on three axes (time, height and width, for
            images) at its folds, so that it stores the tokens' places on these axes.
        rows: the progress of each row.
        outcome: the outcome of the last forward, or of the running one so far.
        slots: the data that all decode steps over these layers share.
    """

    rows: Rows
    outcome: Outcome
    slots: StepSlots

    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__(layers)
        parts = groupby(self, key=lambda layer: layer.spec.index)
        self.by_index = [LayerParts(tuple(each)) for _, each in parts]
        self.moves_on_axes = any(layer.spec.moves_on_axes for layer in self)
        reasons = (layer.spec.why_not_constant() for layer in self)
        self.slots = StepSlots(next((reason for reason in reasons if reason is not None), None))

    def reset(self) -> None:
        """Forget all rows."""
        for layer in self:
            layer.reset()
        self.rows, self.outcome = Rows(), Outcome()

    def step(self, segment: Segment) -> Step | None:
        """Return a step of one token for each row; None if steps cannot have a constant shape, or a
        layer has no slots or has not attended yet.
        """
        if not self._read_slots():
            return None
        places = np.array(segment.seen) + segment.origin
        if segment.drift is not None:
            places += segment.drift.cpu().numpy()
        busy = [row for row, count in enumerate(segment.counts) if count]
        return Step(self.slots, segment.waiting, places, busy, self._held)

    def _read_slots(self) -> bool:
        """Find the slots that steps read and write, if they have changed since the last step.
        Returns False if steps cannot have a constant shape, or a layer has no slots or has not
        attended yet.
        """
        slots, version = self.slots, LayerState.version
        if slots.reason is not None:
            return False
        if slots.version != version:
            held = [layer.state.slab for layer in self if layer.params is not None]
            whole = [slab for slab in held if slab is not None]
            if len(whole) < len(self):
                return False
            spans = [[layer.state.first, *layer.state.used] for layer in self]
            slots.version, slots.slabs, slots.spans = version, whole, np.array(spans)
        return True

    def _held(self) -> list[list[HeldPart]]:
        return [[part.held() for part in layer.parts] for layer in self.by_index]


class Forward:
    """One call through all layers.

    Attributes:
        stack: the layers and rows of the call.
        given: the decoder's arguments by name.
        plan: the segments of the call.
    """

    _stored = False
    """Whether a step has stored everything, and no layer has anything to check or fold."""

    def __init__(
        self,
        stack: LayerStack,
        given: Given,
        begun: BegunForward,
        rotaries: dict[str | None, Rotary],
        begin: Callable[[Given, tuple[int, ...]], Forward],
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
        if not torch.is_grad_enabled():  # entering no_grad again takes time
            return parts.attend(queries, keys, values, params, plan)
        with torch.no_grad():
            out = parts.attend(queries, keys, values, params, plan)
        refused: Tensor = _NoGradient.apply(out, queries, keys, values)
        return refused

    def step(self) -> Step | None:
        """Return the call as a decode step; None if it cannot be one."""
        if not self.plan.step:
            return None
        (segment,) = self.plan.segments
        return None if segment.pictured is not None else self.stack.step(segment)

    def commit_step(self, step: Step) -> None:
        """Note that an engine has run the step."""
        assert step.largest is not None
        (segment,) = self.plan.segments
        # All layers are checked at once. Only if that fails is each layer checked separately.
        whole = math.isfinite(step.largest.amax().item() if step.top is None else step.top)
        self._stored = whole and not segment.due and not self.stack.moves_on_axes
        if self._stored:
            return
        rows = step.largest.flatten(2).amax(2) if step.largest.ndim == 3 else step.largest
        per_layer = [None] * len(self.stack) if whole else rows
        for layer, largest in zip(self.stack, per_layer, strict=True):
            layer.commit_step(segment, largest)

    # --- the end of the call

    def finish(self) -> Forward | None:
        """Finish a successful call: keep its tokens, and fold full tails.

        Returns the call to repeat, without the rows whose keys or values are not finite; None if
        there is nothing to repeat. If no row with tokens would be left, the call is undone and
        NotFiniteError is raised.
        """
        failed = {} if self._stored else self._unfinite()
        if failed and not self.plan.step:
            return self._again(failed)
        stack = self.stack
        if failed:
            for layer in stack:
                layer.running.abandon_rows(sorted(failed))
            failed = {row: at for row, at in failed.items() if self.plan.segments[0].counts[row]}
            if failed and len(failed) == sum(self.plan.segments[0].counts):
                self._undo()
                raise self._record_failures(failed) from None
        if not self._stored:
            self._commit()
        stack.rows = self._begun.after.keeping(stack.rows, failed) if failed else self._begun.after
        stack.outcome.failed |= self._begun.refused
        if failed:
            self._record_failures(failed)
        return None

    def abandon(self, error: BaseException) -> Forward | None:
        """Undo a call that failed.

        If it failed because keys or values of some rows are not finite, returns the call to repeat
        without these rows, or raises NotFiniteError if no other row has tokens. Returns None if it
        failed for another reason.
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
        # Ids out of range are already replaced in `given`, so `begin` would not refuse their rows.
        refused = self._begun.refused
        self.stack.outcome.failed |= refused
        return self._begin(self.given, (*self._without, *refused, *failed))

    def _with_tokens(self) -> set[int]:
        """Return the rows that have a token in this call."""
        return {row for segment in self.plan.segments for row, n in enumerate(segment.counts) if n}

    def _commit(self) -> None:
        stack = self.stack
        due = tuple(sorted({row for segment in self.plan.segments for row in segment.due}))
        # Until the last layer has folded, an interruption leaves layers that do not fit together.
        stack.outcome.broken = True
        for layer in stack:
            layer.commit()
        stack.outcome.broken = False
        if due:
            seconds = sum(layer.take_fold_seconds() for layer in stack)
            stack.outcome.folded = Folded(due, seconds)

    def _undo(self) -> None:
        for layer in self.stack:
            layer.abandon()

    def _unfinite(self) -> dict[int, tuple[int, int]]:
        """Find the rows with keys or values that are not finite, and for each of them the first
        layer and column where this is so; {} if all keys and values are finite.
        """
        unchecked = [t for layer in self.stack for t in layer.running.unchecked]
        if not unchecked:
            return {}
        # All are checked at once, because a check waits for the accelerator.
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
            for row, column in layer.running.unfinite(self.plan).items():
                found.setdefault(row, (layer.spec.index, column))
        return found

    def _record_failures(self, failed: dict[int, tuple[int, int]]) -> WeirError:
        """Record in the cache which rows failed; returns the first row's error, to be raised."""
        others = bool(self._with_tokens() - set(failed))
        for row, (layer, column) in failed.items():
            self.stack.outcome.failed[row] = self._make_error(row, layer, column, others=others)
        # Make a new error: if the error that the cache holds were raised, it would keep the cache
        # alive.
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


class _NoGradient(torch.autograd.Function):
    """Refuses gradients through attention, because slots are written in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, out: Tensor, *given: Tensor) -> Tensor:
        """Return `out` unchanged; its gradient would pass through `backward`."""
        return out.view_as(out)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> NoReturn:
        """Refuse the gradient (WeirError)."""
        raise WeirError(
            "a StreamingCache has no gradients, because its slots are rewritten in place. Train "
            "without a cache: past_key_values=None and use_cache=False."
        )
