"""The changes that a running forward makes to one layer, until they are committed or abandoned.

A forward that fails in a later layer, or makes keys that are not finite, must leave no trace. So it
writes only into tail slots that are waiting for a token. The fold and the received attention wait
here until the forward has succeeded. A forward that is longer than the free part of the tail, or
that reads a whole prompt at once, folds on the way, and the transaction keeps a copy of the earlier
slots.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weir.cache.layer.fold import Pending, fold_rows
from weir.cache.layer.layer_state import LayerState
from weir.cache.plan import ForwardPlan
from weir.slab import Slab


@dataclass(frozen=True)
class Backup:
    """Copy of a layer from before the forward; `slab` is None if no slots were allocated then."""

    slab: Slab | None
    lengths: list[list[int]]


class Transaction:
    """One layer's part of a running forward. When the forward ends, a new transaction replaces this
    one.

    Attributes:
        pending: the last segment that was answered, which `commit` folds where a tail is full.
        unchecked: tensors [batch, ...] that must be finite, or true if they are bool. One check of
            all layers at the end of a step is cheaper than one for each layer.
        fold_seconds: time spent folding.
    """

    def __init__(self, state: LayerState) -> None:
        self._state = state
        self._backup: Backup | None = None
        self.pending: Pending | None = None
        self.unchecked: list[Tensor] = []
        self.fold_seconds = 0.0

    def note_new_slots(self) -> None:
        """Note that the forward allocates the layer's slots, so that abandoning frees them."""
        self._backup = Backup(None, [])

    # --- the end

    def commit(self) -> None:
        """Fold the rows whose tail is full."""
        pending, self.pending = self.pending, None
        if pending is None or self._state.slab is None or not pending.segment.due:
            return
        start = time.perf_counter()
        fold_rows(self._state, pending)
        self.fold_seconds += time.perf_counter() - start

    def fold_early(self) -> None:
        """Fold a segment before the forward has ended, and keep a copy of the earlier state."""
        state = self._state
        if self._backup is None and state.slab is not None:
            self._backup = Backup(state.slab.copy(), [list(row) for row in state.lengths])
        self.commit()

    def abandon(self) -> None:
        """Restore the layer as it was before the forward."""
        state, backup = self._state, self._backup
        if backup is not None:
            state.slab, state.lengths = backup.slab, backup.lengths
            if state.slab is not None:
                state.refresh()
        if state.slab is not None:
            # A step reads the whole slab, so a NaN would spread even from a slot of weight zero.
            for row, used in enumerate(state.used):
                state.slab.scrub(row, used, used + state.spec.chunk)

    def abandon_rows(self, rows: Sequence[int]) -> None:
        """Remove the tokens of some rows from a step."""
        pending, state = self.pending, self._state
        if pending is None or state.slab is None:
            return
        ends = state.ends(pending.segment.waiting)
        for row in rows:
            state.slab.scrub(row, ends[row], ends[row] + 1)
        self.pending = Pending(pending.segment.without(rows), pending.params)

    # --- finite or not

    def check_finite(self, keys: Tensor, values: Tensor, plan: ForwardPlan) -> None:
        """Refuse new keys and values that are not finite (RowsNotFinite).

        In a step, and on an accelerator, they are only noted, and checked at the end of the
        forward.
        """
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
                raise RowsNotFinite(self._state.spec.index, columns)
        else:
            self.unchecked = [finite_columns(keys, values)]

    def unfinite(self, plan: ForwardPlan) -> dict[int, int]:
        """Find each row's first column that is not finite; {} if all are."""
        if not self.unchecked:
            return {}
        if self.unchecked[0].dtype == torch.bool:
            return first_unfinite(self.unchecked[0], plan)
        finite = torch.stack(
            [t.isfinite().reshape(t.shape[0], -1).all(dim=1) for t in self.unchecked]
        )
        return dict.fromkeys((~finite.all(dim=0)).nonzero()[:, 0].tolist(), 0)


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
