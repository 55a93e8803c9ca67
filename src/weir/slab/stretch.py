"""Slots of which some are quantized: their keys and values are read when somebody asks for them.

The newest tokens move along at every fold, and no pool looks at them on the way. Quantizing is a
projection (`quantized`), so to move what is stored gives what reading and quantizing it again
would, bit for bit. Knows nothing about pools.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weir.slab.coded import Coded
from weir.slab.slots import Slots, pick

Piece = Coded | tuple[Tensor, Tensor]
"""Slots side by side: quantized, or exact keys and values [batch, kv_heads, n, dim]."""


class Stretch(Slots):
    """Slots that are made of pieces; to pools they are slots like any other.

    Attributes:
        pieces: keys and values as they are stored, a piece after the other; None once others were
            put in their place.
    """

    pieces: list[Piece] | None = None

    @classmethod
    def of(cls, pieces: list[Piece], others: dict[str, Tensor]) -> Stretch:
        """Slots of these pieces, one at least; `others` is all that is not keys and values."""
        made = object.__new__(cls)
        vars(made).update({"mass": None, "span": None, "slab": None, "place": None} | others)
        made.pieces = pieces
        return made

    @property
    def keys(self) -> Tensor:
        """As in `Slots`, worked out when first asked for."""
        return self._numbers("_keys", 0)

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self._put("_keys", keys)

    @property
    def values(self) -> Tensor:
        """As in `Slots`, worked out when first asked for."""
        return self._numbers("_values", 1)

    @values.setter
    def values(self, values: Tensor) -> None:
        self._put("_values", values)

    def part(self, start: int, stop: int) -> Slots:
        """Slots `start` to `stop`, as a view of what is stored."""
        if self.pieces is None:
            return super().part(start, stop)
        found: list[Piece] = []
        at = 0
        for piece in self.pieces:
            length = _length(piece)
            begin, end = max(start - at, 0), min(stop - at, length)
            if begin < end or not (found or at + length < len(self)):
                found.append(_part(piece, begin, max(begin, end)))
            at += length
        return Stretch.of(found, {n: t[:, :, start:stop] for n, t in self.others().items()})

    def join(self, other: Slots) -> Slots:
        """These slots and then the others."""
        if self.pieces is None or not len(self) or not len(other):
            return super().join(other)
        if isinstance(other, Stretch) and other.pieces is not None:
            theirs = other.pieces
        else:
            theirs = [(other.keys, other.values)]
        pieces, first = list(self.pieces), theirs[0]
        if isinstance(pieces[-1], Coded) and isinstance(first, Coded):
            pieces[-1], theirs = pieces[-1].join(first), theirs[1:]
        both = {n: torch.cat([t, getattr(other, n)], dim=2) for n, t in self.others().items()}
        return Stretch.of([*pieces, *theirs], both)

    def weighed(self, a: Tensor, b: Tensor) -> Slots:
        """The same slots with other log-weights."""
        if self.pieces is None:
            return super().weighed(a, b)
        return Stretch.of(self.pieces, {**self.others(), "a": a, "b": b})

    def picked(self, index: Tensor) -> Slots:
        """Copies of the slots that `index` names; quantized ones stay as they are stored."""
        if self.pieces is None or len(self.pieces) > 1 or not isinstance(self.pieces[0], Coded):
            return super().picked(index)
        others = {name: pick(t, index) for name, t in self.others().items()}
        return Stretch.of([self.pieces[0].map(lambda t: pick(t, index))], others)

    def as_stored(self, change: Callable[[Tensor], Tensor]) -> Slots:
        """The same slots, each of the tensors they are stored in put through `change`, which leaves
        its numbers as they are.
        """
        if self.pieces is None:
            return self.map(change)
        pieces: list[Piece] = [
            piece.map(change) if isinstance(piece, Coded) else (change(piece[0]), change(piece[1]))
            for piece in self.pieces
        ]
        return Stretch.of(pieces, {name: change(t) for name, t in self.others().items()})

    def _numbers(self, name: str, place: int) -> Tensor:
        """The keys (place 0) or the values (1), kept under a name."""
        own = vars(self)
        if name not in own:
            assert self.pieces is not None
            read = [_read(piece)[place]() for piece in self.pieces]
            own[name] = read[0] if len(read) == 1 else torch.cat(read, dim=2)
        numbers: Tensor = own[name]
        return numbers

    def _put(self, name: str, t: Tensor) -> None:
        """Put keys or values in place of what is stored."""
        if self.pieces is not None:
            _ = self.keys, self.values
            self.pieces = None
        vars(self)[name] = t


def _length(piece: Piece) -> int:
    return len(piece) if isinstance(piece, Coded) else piece[0].shape[2]


def _part(piece: Piece, start: int, stop: int) -> Piece:
    """Slots `start` to `stop` of a piece, as a view."""
    if isinstance(piece, Coded):
        return piece.part(start, stop)
    return piece[0][:, :, start:stop], piece[1][:, :, start:stop]


def _read(piece: Piece) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """What gives the keys of a piece, and what gives its values."""
    if isinstance(piece, Coded):
        return lambda: piece.keys(0, len(piece)), lambda: piece.values(0, len(piece))
    return lambda: piece[0], lambda: piece[1]
