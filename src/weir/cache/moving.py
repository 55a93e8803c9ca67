"""Rows of a cache that come and go: taken, put and emptied while the others go on.

Between a cache and those who move its rows: `state` says what a row takes along. Knows nothing
about what transformers asks of a cache, nor how a call goes through the layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache.checks import check_memory
from weir.cache.for_transformers import ForTransformers
from weir.cache.layer import Layer
from weir.cache.layers import LayerPlan, three_axes
from weir.cache.row_state import RowState, check_kind, check_state, own_tensors
from weir.cache.rows import Rows
from weir.errors import WeirError, quote
from weir.models import Attachment, weights_of
from weir.policies import Policy
from weir.pools import Marks, fits
from weir.slab import Heads


class MovingRows(ForTransformers):
    """The side of a `StreamingCache` that its rows come and go by.

    Attributes:
        policy, chunk, positions, origin, seed: what the cache was made with.
        plans: of each layer its pipe and the sizes of its slots.
        attachment: what weir put on the model.
        broken: a call was interrupted while it folded.
    """

    policy: Policy
    chunk: int
    positions: str
    origin: int
    seed: int
    plans: list[LayerPlan]
    attachment: Attachment
    broken: bool
    _device: torch.device
    _model: weakref.ref[PreTrainedModel]

    @property
    def _plans_now(self) -> list[LayerPlan]:
        """The plans; of a model spread over devices by heads, with this device's share."""
        return [
            plan.of(layer.state.slab) for plan, layer in zip(self.plans, self.stack, strict=True)
        ]

    @property
    def kind(self) -> dict[str, Any]:
        """What a cache must have in common with this one to go on with its rows (`RowState`)."""
        facts = self.attachment.facts
        return {
            "policy": str(self.policy),
            "pools": self.policy.stands_for,
            "chunk": self.chunk,
            "positions": self.positions,
            "origin": self.origin,
            "model": {
                "kind": facts.kind,
                "layers": len(self.stack),
                "heads": [_written(plan.heads) for plan in self._plans_now],
            },
            "weights": weights_of(facts.decoder, facts.config),
        }

    def take_row(self, row: int) -> RowState:
        """The whole state of a row, to be put into this cache or another; the row stays as it is.

        Raises:
            WeirError: there is no such row.
        """
        self._check_row(row)
        self._check_whole()
        return self._taken(row, self.kind)

    def _taken(self, row: int, kind: dict[str, Any]) -> RowState:
        """A copy of a row of a cache of this kind."""
        only = self.rows.select([row])
        tensors: dict[str, Tensor] = {}
        lengths = []
        for index, layer in enumerate(self.stack):
            its, used = layer.state.take_row(row)
            tensors |= {f"{index}.{name}": t for name, t in its.items()}
            lengths.append(used)
        facts = {
            "columns": only.columns,
            "seen": only.seen[0],
            "waiting": only.waiting[0],
            "claimed": only.claimed[0],
            "last": only.last[0],
            "ended": only.ended[0],
            "seed": self.stack[0].state.seeds[row],
            "marks": asdict(only.marks[0]),
            "lengths": lengths,
        }
        if three_axes(self.plans):
            facts["drift"] = only.drift[0]
        return RowState(kind, facts, tensors)

    def put_row(self, row: int, state: RowState, *, check: bool = True) -> None:
        """Put a row in the place of another, to go on as it would have where it was taken.

        Args:
            row: which row; of a cache that nothing was fed to, row 0 makes it a cache of one row.
            state: from `take_row` of any cache of the same model, policy, chunk, positions and
                origin.
            check: whether all its numbers are looked at, which takes longer than to put it. Who has
                it from `take_row`, and knows that nobody changed it since, needs that not; of what
                cache it is is looked at all the same.

        Raises:
            WeirError: there is no such row, or the state is of another model, policy, chunk or
                dtype, or one that no row can have; the row is as it was.
        """
        _check_states([state])
        self._check_whole()
        new = self.rows.batch is None and fits(row, int) and row == 0
        if not new:
            self._check_row(row)
        if check:
            self._check([state])
        else:
            check_kind(self.kind, state.kind)
        if new:
            self._open(1)
        self._put(row, state)

    def _put(self, row: int, state: RowState) -> None:
        """Put a row whose state has been checked."""
        own = [own_tensors(layer, state) for layer in self.stack]
        facts = state.facts
        names = ("seen", "waiting", "claimed", "last", "ended")
        parts: list[Any] = [[facts[name]] for name in names]
        parts += [[Marks(**facts["marks"])], [facts.get("drift", 0)]]  # no drift on one axis
        other = Rows(facts["columns"], *parts)
        for layer, tensors, lengths in zip(self.stack, own, facts["lengths"], strict=True):
            layer.state.put_row(row, tensors, lengths, facts["seed"])
        self.rows = self.rows.with_row(row, other)

    def take_rows(self) -> list[RowState]:
        """The whole state of every row; none before the first token."""
        self._check_whole()
        if self.rows.batch is None or self.stack[0].state.slab is None:
            return []
        kind = self.kind
        return [self._taken(row, kind) for row in range(self.rows.batch)]

    def put_rows(self, states: Iterable[RowState]) -> None:
        """Take over rows of another cache in place of all of its own.

        Raises:
            WeirError: as `put_row`, or what is given are no states; the rows are as they were.
        """
        given = list(states) if isinstance(states, Iterable) else states
        if not isinstance(given, list):
            raise WeirError(f"rows are a list of what take_row gives, not {quote(states)}")
        self._check_wide()
        _check_states(given)
        self._check(given)
        self.reset()
        if not given:
            return
        self._open(len(given))
        for row, state in enumerate(given):
            self._put(row, state)
        self.rows = replace(self.rows, columns=max(state.facts["columns"] for state in given))

    def _check(self, states: list[RowState]) -> None:
        """Refuse states that are not of rows of such a cache.

        Raises:
            WeirError: naming what differs, or what is wrong.
        """
        kind, plans = self.kind, self._plans_now
        for state in states:
            check_kind(kind, state.kind)
            check_state(
                plans,
                state,
                vocabulary=self.attachment.facts.vocabulary,
                chunk=self.chunk,
                origin=self.origin,
            )

    def reset_row(self, row: int, *, seed: int | None = None) -> None:
        """Empty a row, for a new stream; the others stay as they are.

        Args:
            row: which row.
            seed: of its draws; None for the cache's.

        Raises:
            WeirError: there is no such row, or the seed is none.
        """
        if seed is not None and (not fits(seed, int) or seed < 0):
            raise WeirError(f"seed must be a whole number from 0 on, not {quote(seed)}")
        self._check_whole()
        self._check_row(row)
        for layer in self.stack:
            layer.state.reset_row(row, self.origin, self.seed if seed is None else seed)
        self.rows = self.rows.with_row(row, Rows.empty(1))

    @property
    def marks(self) -> list[Marks]:
        """What each row was told of its stream (`mark`)."""
        return list(self.rows.marks)

    def mark(self, row: int, marks: Marks) -> None:
        """Tell a row of its stream what pools cannot see in tokens, in place of what it was told.

        The pools `beginning` and `header` go by it, from the next fold on; for all others it does
        not matter. Marks go along where the row goes.

        Args:
            row: which row; 0 of a cache that has none yet makes it a cache of one row.
            marks: of its stream.

        Raises:
            WeirError: there is no such row; or tokens of it were folded already, and its beginning
                was another.
        """
        if not isinstance(marks, Marks):
            raise WeirError(f"a row is told weir.pools.Marks, not {quote(marks)}")
        self._check_whole()
        if row == 0 and self.rows.batch is None:
            self._open(1)
        self._check_row(row)
        before = self.rows.marks[row]
        if self.rows.seen[row] > self.rows.waiting[row] and before.beginning != marks.beginning:
            raise WeirError(
                f"the beginning of row {row} is {before.beginning} tokens and cannot become "
                f"{marks.beginning} any more: it has been folded"
            )
        self.rows = self.rows.marked(row, marks)

    def only(self, start: int, stop: int) -> AbstractContextManager[None]:
        """While it lasts, the rows `start` to `stop` are all that this cache has, from 0 on.

            with cache.only(2, 3):  # a prompt for row 2, and nothing is computed for the others
                model(prompt, past_key_values=cache)

        Args:
            start: the first of them.
            stop: behind the last of them.

        Raises:
            WeirError: there are no such rows, it is narrowed already, or the policy has no limit.
        """
        self._check_whole()
        self._check_row(start)
        self._check_row(stop - 1 if fits(stop, int) and stop > start else -1)
        return narrow(self, start, stop)

    def _open(self, batch: int) -> None:
        """Make the slots of so many empty rows."""
        check_memory(self.plans, self.policy, batch, self._device)
        model = self._model()
        for layer, plan in zip(self.stack, self.plans, strict=True):
            device = self._device_of(model, plan.spec.index)
            start = torch.full((batch,), self.origin, dtype=torch.int64, device=device)
            layer.state.allocate(plan.heads, batch, start, device, [self.seed] * batch)
        self.rows = Rows.empty(batch)

    def _device_of(self, model: PreTrainedModel | None, layer: int) -> torch.device:
        """Where the keys of a layer come to be."""
        placed = getattr(model, "hf_device_map", None)
        if model is None or not placed:
            return self._device
        module = self.attachment.facts.attentions[layer]
        held = next(module.parameters(), None)
        where = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if where is not None:
            return torch.device(where)
        return self._device if held is None or held.device.type == "meta" else held.device

    def _check_row(self, row: int) -> None:
        batch = self.rows.batch
        if batch is None or self.stack[0].state.slab is None:
            raise WeirError(
                "this cache has no rows yet: feed it, or make it with batch=n for n empty rows"
            )
        if not fits(row, int) or not 0 <= row < batch:
            raise WeirError(f"row {quote(row)} does not exist; the rows are 0 to {batch - 1}")

    def _check_whole(self) -> None:
        if self.broken:
            self.attachment.wait()  # it may be folding in another thread
        if self.broken:
            raise WeirError(
                "a call with this cache was interrupted while it folded; reset() it or restore a "
                "saved session"
            )


def _check_states(states: list[RowState]) -> None:
    """Refuse what did not come from `take_row`.

    Raises:
        WeirError: the first that did not.
    """
    for state in states:
        if not isinstance(state, RowState):
            raise WeirError(f"a row's state is what take_row gives, not {quote(state)}")


def _written(heads: Heads) -> list[int | str]:
    """The sizes of a layer's heads, as JSON can hold them."""
    sizes = [heads.kv_heads, heads.group, heads.key_dim, heads.value_dim]
    return [*sizes, str(heads.dtype).removeprefix("torch.")]


class Narrowable(Protocol):
    """The cache."""

    stack: list[Layer]
    rows: Rows
    broken: bool


@contextmanager
def narrow(cache: Narrowable, start: int, stop: int) -> Iterator[None]:
    """Within, the rows `start` to `stop` are all that a cache has, numbered from 0.

    Nothing is copied: slots are views. What forwards do to the rows they have done to the cache
    afterwards, whether or not the last of them failed.

    Args:
        cache: past its first token, or made with `batch=n`.
        start, stop: rows that exist.

    Raises:
        WeirError: pools of the policy have no limit, so that slots may have to be made anew; or the
            cache is narrowed already.
    """
    if any(layer.spec.pipe.slots is None for layer in cache.stack):
        raise WeirError("this policy has no limit, so that its rows cannot be fed apart")
    if any(layer.state.narrowed for layer in cache.stack):
        raise WeirError("this cache is narrowed already")
    rows = cache.rows
    if start == 0 and stop == rows.batch:
        yield
        return
    for layer in cache.stack:
        layer.state.narrow(start, stop)
    cache.rows = rows.select(list(range(start, stop)))
    try:
        yield
    finally:
        for layer in cache.stack:
            layer.state.widen()
        inside, cache.rows = cache.rows, rows
        for row in range(start, stop):
            cache.rows = cache.rows.with_row(row, inside.select([row - start]))
