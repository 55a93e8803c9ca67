"""The layers of a cache, and the rows of its batch in all of them.

A server feeds a prompt to one row and one token to each row that is generating, so a stack can be
narrowed to adjacent rows, without copying their slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from weir.cache.layer import Layer
from weir.cache.layers import LayerPlan, reads_twice, three_axes
from weir.cache.row_state import RowState, own_tensors
from weir.cache.rows import Rows
from weir.errors import WeirError, quote
from weir.pools import Marks, fits


@dataclass(frozen=True)
class Folded:
    """The folds of one forward, passed to `StreamingCache.on_fold`.

    Attributes:
        rows: the rows that folded, in all layers.
        seconds: time that all layers took to fold; on an accelerator, only the time to launch.
    """

    rows: tuple[int, ...]
    seconds: float


class LayerStack:
    """The layers of a cache, by index, and the progress of each row of the batch.

    Attributes:
        plans: the pipe of each layer and the sizes of its slots.
        rows: the progress of each row.
        broken: whether a call was interrupted during a fold.
        failed: by row, why its tokens of the last forward were refused.
        folded: the folds of the last forward, until `on_fold` is called.
        again: by row, the ids of a chunk that has folded and is to be read a second time.
    """

    def __init__(self, plans: list[LayerPlan], origin: int) -> None:
        self.plans = plans
        self._origin = origin
        self._layers = [Layer(plan.spec) for plan in plans]
        self.reset()

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> Layer:
        return self._layers[index]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._layers)

    def reset(self) -> None:
        """Forget all rows."""
        for layer in self._layers:
            layer.reset()
        self.rows = Rows()
        self.broken = False
        self.failed: dict[int, WeirError] = {}
        self.folded: Folded | None = None
        self.again: dict[int, list[int]] = {}

    def open(self, seeds: list[int], devices: list[torch.device]) -> None:
        """Allocate one empty row for each seed, every layer's slots on its own device."""
        batch = len(seeds)
        for layer, plan, device in zip(self._layers, self.plans, devices, strict=True):
            start = torch.full((batch,), self._origin, dtype=torch.int64, device=device)
            layer.state.allocate(plan.heads, batch, start, device, seeds)
        self.rows = Rows.empty(batch)

    @property
    def is_open(self) -> bool:
        """Whether slots are allocated."""
        return self._layers[0].state.slab is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        slabs = (layer.state.slab for layer in self._layers)
        return sum(slab.nbytes for slab in slabs if slab is not None)

    @property
    def plans_now(self) -> list[LayerPlan]:
        """The plans, with this device's share of the heads if the model is spread by heads."""
        both = zip(self.plans, self._layers, strict=True)
        return [plan.of(layer.state.slab) for plan, layer in both]

    def check_row(self, row: int) -> None:
        """Refuse a row that does not exist (WeirError)."""
        batch = self.rows.batch
        if batch is None or not self.is_open:
            raise WeirError(
                "this cache has no rows yet: feed it, or make it with batch=n for n empty rows"
            )
        if not fits(row, int) or not 0 <= row < batch:
            raise WeirError(f"row {quote(row)} does not exist; the rows are 0 to {batch - 1}")

    def check_wide(self) -> None:
        """Refuse to change the set of rows while the stack is narrowed (WeirError)."""
        if any(layer.state.narrowed for layer in self._layers):
            raise WeirError("this cache is narrowed to some of its rows; leave only() first")

    def take(self, row: int, kind: dict[str, Any]) -> RowState:
        """Copy a row; `kind` describes the cache."""
        only = self.rows.select([row])
        tensors: dict[str, Tensor] = {}
        lengths = []
        for index, layer in enumerate(self._layers):
            taken, used = layer.state.take_row(row)
            tensors |= {f"{index}.{name}": t for name, t in taken.items()}
            lengths.append(used)
        facts: dict[str, Any] = {
            "columns": only.columns,
            "seen": only.seen[0],
            "waiting": only.waiting[0],
            "claimed": only.claimed[0],
            "last": only.last[0],
            "ended": only.ended[0],
            "seed": self._layers[0].state.seeds[row],
            "marks": asdict(only.marks[0]),
            "lengths": lengths,
        }
        if three_axes(self.plans):
            facts["drift"] = only.drift[0]
        if reads_twice(self.plans):
            facts["tail"] = only.tail[0]
        return RowState(kind, facts, tensors)

    def put(self, row: int, state: RowState) -> None:
        """Overwrite a row with a state that has been checked."""
        own = [own_tensors(layer, state) for layer in self._layers]
        facts = state.facts
        names = ("seen", "waiting", "claimed", "last", "ended")
        parts: list[Any] = [[facts[name]] for name in names]
        parts += [[Marks(**facts["marks"])], [facts.get("drift", 0)]]  # no drift on one axis
        parts.append([facts.get("tail", [])])
        other = Rows(facts["columns"], *parts)
        for layer, tensors, lengths in zip(self._layers, own, facts["lengths"], strict=True):
            layer.state.put_row(row, tensors, lengths, facts["seed"])
        self.rows = self.rows.with_row(row, other)

    def empty_row(self, row: int, seed: int) -> None:
        """Empty a row for a new stream with this seed."""
        for layer in self._layers:
            layer.state.reset_row(row, self._origin, seed)
        self.rows = self.rows.with_row(row, Rows.empty(1))

    def select(self, rows: list[int]) -> None:
        """Keep, repeat or reorder the rows."""
        for layer in self._layers:
            slab = layer.state.slab
            if slab is not None:
                layer.state.select_rows(torch.tensor(rows, device=slab.keys.device))
        self.rows = self.rows.select(rows)

    @contextmanager
    def narrow(self, start: int, stop: int) -> Iterator[None]:
        """Hold only the rows `start` to `stop` within the context, numbered from 0, as views.

        Changes to these rows stay, also if the last forward failed. Raises WeirError if the policy
        has no limit, so that slots may have to be reallocated, or if the stack is narrowed already.
        """
        if any(layer.spec.pipe.slots is None for layer in self._layers):
            raise WeirError("this policy has no limit, so that its rows cannot be fed apart")
        if any(layer.state.narrowed for layer in self._layers):
            raise WeirError("this cache is narrowed already")
        rows = self.rows
        if start == 0 and stop == rows.batch:
            yield
            return
        for layer in self._layers:
            layer.state.narrow(start, stop)
        self.rows = rows.select(list(range(start, stop)))
        try:
            yield
        finally:
            for layer in self._layers:
                layer.state.widen()
            inside, self.rows = self.rows, rows
            for row in range(start, stop):
                self.rows = self.rows.with_row(row, inside.select([row - start]))
