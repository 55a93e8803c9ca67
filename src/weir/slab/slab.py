"""The slots of one layer: fixed buffers, and the parts of them that pools pass around.

Knows nothing about policies, models or how attention is computed.

A row of the slab lies like this, from slot 0 on::

    | front: pools whose tokens lost their neighbours | run: recent tokens, unbroken | tail | free |

The *tail* holds what came since the last fold. Keys of the run and of the tail are rotated once, at
their place in the stream, and stay as they are. Keys of the front move closer to the present as the
stream goes on: what attention reads is made anew from a *master* at each fold, so that no error
adds up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weir.slab.attention import split_weights
from weir.slab.slots import EMPTY, Slots

_BUFFERS = (
    *("keys", "values", "a", "b", "position", "mass"),
    *("masters", "mask", "numerator", "denominator", "frame", "queries"),
)
_STATE = "state."


class Slab:
    """The buffers of one layer, made once.

    Attributes:
        keys: what attention reads [batch, kv_heads, slots, key_dim].
        values: [batch, kv_heads, slots, value_dim].
        masters: keys of the front as they were said [batch, kv_heads, front, key_dim]; None where
            keys never move (`positions="original"`, or a model without RoPE).
        mask, numerator, denominator: a and b as attention reads them (`split_weights`)
            [batch, kv_heads, slots], for pipes that use two weights; None otherwise.
        frame: the positions attention pretends [batch, kv_heads, slots], int64, where its bias
            needs them (ALiBi); None otherwise.
        queries: the last queries, and behind them those of the tail, as attention saw them
            [batch, kv_heads, queries, group * key_dim]; None unless a pool asks for them or for the
            attention received.
        state: what pools remember beside their slots, by a name [batch, kv_heads, ...].
        a, b, position, mass: as in `Slots`.
    """

    def __init__(
        self,
        like_keys: Tensor,
        like_values: Tensor,
        slots: int,
        *,
        masters: int = 0,
        mass: bool = False,
        two_weights: bool = False,
        frames: bool = False,
        queries: int = 0,
        group: int = 1,
    ) -> None:
        """Buffers for `slots` slots of the batch, heads, sizes, dtype and device of the tensors."""
        # Never inference tensors: the same slab is written in and outside inference mode.
        with torch.inference_mode(False):
            shape = (*like_keys.shape[:2], slots)
            device = like_keys.device
            self.keys = like_keys.new_zeros((*shape, like_keys.shape[3]))
            self.values = like_values.new_zeros((*shape, like_values.shape[3]))
            self.a = torch.full(shape, -torch.inf, device=device)
            self.b = torch.full(shape, -torch.inf, device=device)
            self.position = torch.full(shape, EMPTY, dtype=torch.int64, device=device)
            self.mass = torch.zeros(shape, device=device) if mass else None
            self.masters = (
                like_keys.new_zeros((*shape[:2], masters, like_keys.shape[3])) if masters else None
            )
            self.mask = torch.full_like(self.b, -torch.inf) if two_weights else None
            self.numerator = torch.zeros_like(self.a) if two_weights else None
            self.denominator = torch.zeros_like(self.b) if two_weights else None
            self.frame = torch.zeros_like(self.position) if frames else None
            asked = (*shape[:2], queries, group * like_keys.shape[3])
            self.queries = like_keys.new_zeros(asked) if queries else None
        self.state: dict[str, Tensor] = {}

    @classmethod
    def of(cls, buffers: dict[str, Tensor]) -> Slab:
        """A slab made of buffers that `tensors` named."""
        slab = object.__new__(cls)
        for name in _BUFFERS:
            setattr(slab, name, buffers.get(name))
        slab.state = {
            name.removeprefix(_STATE): t for name, t in buffers.items() if name.startswith(_STATE)
        }
        return slab

    def __len__(self) -> int:
        return self.position.shape[2]

    def tensors(self) -> dict[str, Tensor]:
        """The buffers by name, and what pools remember."""
        return {**self._buffers(), **{_STATE + name: t for name, t in self.state.items()}}

    def _buffers(self) -> dict[str, Tensor]:
        return {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}

    @property
    def split(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(mask, numerator, denominator), for `split_attention`; None for pipes of one weight."""
        if self.mask is None or self.numerator is None or self.denominator is None:
            return None
        return self.mask, self.numerator, self.denominator

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for t in self.tensors().values())

    def run(self, start: int, stop: int) -> Slots:
        """Slots of the run or of the tail, as a view."""
        view = Slots(
            keys=self.keys[:, :, start:stop],
            values=self.values[:, :, start:stop],
            a=self.a[:, :, start:stop],
            b=self.b[:, :, start:stop],
            position=self.position[:, :, start:stop],
            mass=None if self.mass is None else self.mass[:, :, start:stop],
        )
        view.slab, view.place = self, start
        return view

    def apart(self, slots: Slots) -> Slots:
        """The same slots, in memory of their own where they lie in this slab.

        What is to be written somewhere in the slab may be what has to be read elsewhere.
        """
        mine = {t.untyped_storage().data_ptr() for t in self._buffers().values()}
        return slots.map(lambda t: t.clone() if t.untyped_storage().data_ptr() in mine else t)

    def front(self, start: int, stop: int) -> Slots:
        """Slots of the front, with their master keys, as a view."""
        slots = self.run(start, stop)
        slots.slab = slots.place = None
        if self.masters is not None:
            slots.keys = self.masters[:, :, start:stop]
        return slots

    def append(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Put keys and values [batch, kv_heads, n, dim] into the tail from slot `start` on."""
        # In every step of every layer: a narrowed copy costs half of what an index does.
        count = keys.shape[2]
        self.keys.narrow(2, start, count).copy_(keys)
        self.values.narrow(2, start, count).copy_(values)

    def ask(self, queries: Tensor, start: int) -> None:
        """Remember queries [batch, kv_heads, group, n, key_dim] from place `start` on."""
        assert self.queries is not None
        self.queries.narrow(2, start, queries.shape[3]).copy_(lined(queries))

    def ask_at(self, queries: Tensor, rows: Tensor, places: Tensor, columns: Tensor) -> None:
        """Remember the query of column `columns[i]` of row `rows[i]` at `places[i]`, for all i."""
        assert self.queries is not None
        self.queries[rows, :, places] = lined(queries)[rows, :, columns]

    def append_at(
        self, keys: Tensor, values: Tensor, rows: Tensor, slots: Tensor, columns: Tensor
    ) -> None:
        """Put `keys[rows[i], :, columns[i]]` into slot `slots[i]` of row `rows[i]`, for all i."""
        self.keys[rows, :, slots] = keys[rows, :, columns]
        self.values[rows, :, slots] = values[rows, :, columns]

    def write(self, start: int, slots: Slots, *, front: bool) -> None:
        """Overwrite from slot `start` on; the front's keys go to the masters."""
        stop = start + len(slots)
        keys = self.masters if front and self.masters is not None else self.keys
        keys[:, :, start:stop] = slots.keys
        for name, t in slots.tensors().items():
            if name != "keys":
                getattr(self, name)[:, :, start:stop] = t
        if self.split is not None:
            for buffer, t in zip(self.split, split_weights(slots.a, slots.b), strict=True):
                buffer[:, :, start:stop] = t

    def open_tail(self, start: int, seen: Tensor, chunk: int) -> None:
        """Make `chunk` slots from `start` on ready for the next tokens, and empty the rest.

        `seen` [batch] is each row's next place in the stream. Slots that wait for a token already
        carry its position: it lies in the future of every query until the token is there.
        """
        stop = start + chunk
        steps = torch.arange(chunk, device=self.position.device)
        self.position[:, :, start:stop] = (seen[:, None] + steps)[:, None]
        if self.frame is not None:
            self.frame[:, :, start:stop] = self.position[:, :, start:stop]
        self.position[:, :, stop:] = EMPTY
        for weights in (self.a, self.b, self.mask):
            if weights is not None:
                weights[:, :, start:stop] = 0.0
                weights[:, :, stop:] = -torch.inf
        for factors in (self.numerator, self.denominator):
            if factors is not None:
                factors[:, :, start:stop] = 1.0
                factors[:, :, stop:] = 0.0
        if self.mass is not None:
            self.mass[:, :, start:] = 0.0

    def copy(self) -> Slab:
        """A slab of its own with the same content."""
        with torch.inference_mode(False):
            return Slab.of({name: t.clone() for name, t in self.tensors().items()})

    def rows(self, index: Tensor) -> Slab:
        """A slab that holds copies of the rows `index` [n]."""
        with torch.inference_mode(False):
            return Slab.of({name: t.index_select(0, index) for name, t in self.tensors().items()})

    def put_rows(self, index: Tensor, other: Slab) -> None:
        """Write the rows of `other` back to the rows `index` [n]."""
        theirs = other.tensors()
        with torch.inference_mode(False):
            for name, t in self.state.items():
                if longer(theirs[_STATE + name], t):
                    more = theirs[_STATE + name].shape[2] - t.shape[2]
                    zeros = t.new_zeros((*t.shape[:2], more, *t.shape[3:]))
                    self.state[name] = torch.cat([t, zeros], dim=2)
        for name, t in self.tensors().items():
            t.index_copy_(0, index, theirs[name])

    def grow(self, slots: int, masters: int = 0) -> None:
        """Replace the buffers that are smaller by larger ones; for pipes without a limit only."""
        with torch.inference_mode(False):
            for name, t in self._buffers().items():
                if name == "queries":
                    continue
                size = masters if name == "masters" else slots
                if size <= t.shape[2]:
                    continue
                fill = {
                    "a": -torch.inf,
                    "b": -torch.inf,
                    "mask": -torch.inf,
                    "position": EMPTY,
                }.get(name, 0)
                larger = t.new_full((*t.shape[:2], size, *t.shape[3:]), fill)
                larger[:, :, : t.shape[2]] = t
                setattr(self, name, larger)


def lined(queries: Tensor) -> Tensor:
    """[batch, kv_heads, group, n, key_dim] to [batch, kv_heads, n, group * key_dim]."""
    return queries.transpose(2, 3).flatten(3)


def longer(t: Tensor, than: Tensor) -> bool:
    """Whether the slots, or what a pool remembers one by one, are more than those of the other."""
    if t.ndim != than.ndim or t.ndim < 3:
        return False
    return t.shape[2] > than.shape[2] and t.shape[3:] == than.shape[3:]
