"""Slots as pools pass them around: views of a slab, or tokens on their way between pools."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

EMPTY = -1
"""The position of a slot that holds no token."""


_OTHERS = ("a", "b", "position", "mass", "span")
"""The tensors of slots beside keys and values."""


@dataclass
class Slots:
    """Some slots of one layer: a view of a slab's rows, or tokens on their way between pools.

    Attributes:
        keys: as the attention sees them at their own place in the stream
            [batch, kv_heads, slots, key_dim].
        values: [batch, kv_heads, slots, value_dim].
        a: log-weights in the numerator [batch, kv_heads, slots], float32.
        b: log-weights in the denominator [batch, kv_heads, slots], float32; both are -inf where a
            slot is empty.
        position: places in the stream [batch, kv_heads, slots], int64; -1 where a slot is empty.
        mass: attention received so far, up to the last fold where it lies in a slab [batch,
            kv_heads, slots], float32; None unless a pool of the pipe asks for it.
        span: where the token's word or image begins on three axes, and how far it reaches [batch,
            kv_heads, slots, 2], int64; None unless the model has three and slots are moved.
        slab: the `Slab` this is a view of, and
        place: the first slot of that view; both None for slots that lie elsewhere, or whose tensors
            were replaced (`dataclasses.replace`, which is how a pool sets weights).
    """

    keys: Tensor
    values: Tensor
    a: Tensor
    b: Tensor
    position: Tensor
    mass: Tensor | None = None
    span: Tensor | None = None
    slab: Any = field(default=None, init=False)
    place: int | None = field(default=None, init=False)

    def __len__(self) -> int:
        return self.position.shape[2]

    @property
    def held(self) -> Tensor:
        """Which slots hold a token [batch, kv_heads, slots], bool."""
        return self.position >= 0

    @property
    def finite(self) -> bool:
        """Whether the keys and values of all tokens are finite."""
        # One sum is enough, unless it overflows or an empty slot is not finite.
        if math.isfinite(self.keys.sum() + self.values.sum()):
            return True
        there = self.keys.isfinite().all(dim=3) & self.values.isfinite().all(dim=3)
        return bool((there | ~self.held).all())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name; `mass` and `span` only where they are kept."""
        return {"keys": self.keys, "values": self.values, **self.others()}

    def others(self) -> dict[str, Tensor]:
        """All tensors but keys and values, by name."""
        own = vars(self)  # a fold asks some twenty times: `dataclasses.fields` would be felt
        return {name: own[name] for name in _OTHERS if own[name] is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> Slots:
        """New slots, no view of a slab: each tensor [batch, kv_heads, slots, ...] changed."""
        return Slots(**{name: change(t) for name, t in self.tensors().items()})

    def of_rows(self, index: Tensor) -> Slots:
        """Copies of the rows `index` [n] of the batch."""
        return self.map(lambda t: t.index_select(0, index))

    def part(self, start: int, stop: int) -> Slots:
        """Slots `start` to `stop`, as a view."""
        cut = self.map(lambda t: t[:, :, start:stop])
        if self.place is not None:
            cut.slab, cut.place = self.slab, self.place + start
        return cut

    def take(self, index: Tensor) -> Slots:
        """The slots that `index` [batch, kv_heads, n] names; where it is -1 the slot is empty."""
        nowhere = index < 0
        taken = self.picked(index.clamp_min(0))
        taken.a = taken.a.masked_fill(nowhere, -torch.inf)
        taken.b = taken.b.masked_fill(nowhere, -torch.inf)
        taken.position = taken.position.masked_fill(nowhere, EMPTY)
        if taken.mass is not None:
            taken.mass = taken.mass.masked_fill(nowhere, 0.0)
        return taken

    def weighed(self, a: Tensor, b: Tensor) -> Slots:
        """The same slots with other log-weights."""
        return replace(self, a=a, b=b)

    def picked(self, index: Tensor) -> Slots:
        """Copies of the slots that `index` [batch, kv_heads, n], from 0 on, names."""
        return self.map(lambda t: pick(t, index))

    def join(self, other: Slots) -> Slots:
        """These slots and then the others; a view where both lie side by side in one slab."""
        if self.slab is not None and self.slab is other.slab:
            assert self.place is not None
            if self.place + len(self) == other.place:
                both: Slots = self.slab.run(self.place, self.place + len(self) + len(other))
                return both
        if len(other) == 0:
            return self
        if len(self) == 0:
            return other
        theirs = other.tensors()
        return Slots(
            **{name: torch.cat([t, theirs[name]], dim=2) for name, t in self.tensors().items()}
        )

    def only(self, mask: Tensor) -> Slots:
        """The tokens where `mask` [batch, kv_heads, slots] is true, in order, and no empty slots
        but those of heads that have fewer tokens than the fullest.
        """
        mask = mask & self.held
        counts = set(mask.sum(dim=2).flatten().tolist())
        if counts <= {len(self)}:
            return self
        if len(counts) == 1:
            # As many in each head, as is mostly so: no slot is going to be empty.
            index = mask.nonzero()[:, 2].view(*mask.shape[:2], *counts)
            return self.picked(index)
        count = mask.cumsum(dim=2)
        width = max(counts)
        # Where each goes; all others to a place beyond the last.
        place = (count - 1).where(mask, width)
        order = place.new_full((*place.shape[:2], width + 1), EMPTY)
        steps = torch.arange(len(self), device=place.device).expand_as(place)
        return self.take(order.scatter_(2, place, steps)[:, :, :width])

    def by_position(self) -> Slots:
        """Sorted from the oldest token to the newest, empty slots first."""
        return self.take_sorted(self.position.argsort(dim=2, stable=True))

    def take_sorted(self, order: Tensor) -> Slots:
        """`take` with an order of all slots, empty ones too."""
        return self.take(torch.where(self.position.gather(2, order) < 0, EMPTY, order))


def pick(t: Tensor, index: Tensor) -> Tensor:
    """The slots of `t` [batch, heads, slots(, dim)] that `index` [batch, heads, n], from 0 on,
    names.
    """
    if t.ndim == 3:
        return t.gather(2, index)
    batch, heads, _, dim = t.shape
    steps = t.stride()
    if not t.numel() or steps[3] != 1 or any(step % dim for step in steps[:3]):
        return t.gather(2, index[..., None].expand(-1, -1, -1, dim))
    # The memory under `t` as one long list of rows: to copy whole rows is several times as fast as
    # to gather numbers.
    row, head, slot = (step // dim for step in steps[:3])
    last = sum((n - 1) * step for n, step in zip(t.shape[:3], (row, head, slot), strict=True))
    rows = t.as_strided((last + 1, dim), (dim, 1))
    starts = _starts(batch, heads, row, head, t.device)
    index = index if slot == 1 else index * slot
    return rows.index_select(0, (starts + index).flatten()).view(batch, heads, -1, dim)


@lru_cache(maxsize=64)
def _starts(batch: int, heads: int, row: int, head: int, device: torch.device) -> Tensor:
    """Return where the slots of each head begin, by the strides [batch, heads, 1], int64."""
    with torch.inference_mode(False):
        starts = torch.arange(batch, device=device)[:, None] * row
        return (starts + torch.arange(heads, device=device) * head)[..., None]
