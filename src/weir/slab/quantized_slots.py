"""The quantized slots of a slab: their keys, values and masters, written and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from weir import kernels
from weir.slab.quantization import (
    Code,
    Format,
    are_levels,
    dequantize,
    dequantize_into,
    quantize_into,
    whole_bytes,
)
from weir.slab.slots import Slots, pick

CODED = "coded."
"""Prefix of the names of a slab's buffers of quantized slots."""
KEYS, VALUES, MASTERS = "keys", "values", "masters"


def quantized_buffers(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select a slab's buffers of quantized slots, by their names in `QuantizedStorage`."""
    return {n.removeprefix(CODED): t for n, t in buffers.items() if n.startswith(CODED)}


class QuantizedStorage:
    """Buffers of quantized slots, a view of them or a copy.

    Keys are what attention reads. Where keys move, masters are the keys as they came, quantized
    once; what attention reads is made from them at each fold, so a key is off by two roundings
    however often it has moved.

    Attributes:
        format: how they are written.
        buffers: by name [batch, kv_heads, slots, ...]: `keys`, `keys_peaks`, `values`,
            `values_peaks`, and where keys move `masters`, `masters_peaks`.
        dtype: of what is read.
    """

    def __init__(self, format: Format, buffers: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.format = format
        self.buffers = buffers
        self.dtype = dtype

    @classmethod
    def of(
        cls, format: Format | None, named: dict[str, Tensor], dtype: torch.dtype
    ) -> QuantizedStorage | None:
        """Select the quantized slots among a slab's buffers; None if there are none."""
        found = quantized_buffers(named)
        return cls(format, found, dtype) if format is not None and found else None

    def __len__(self) -> int:
        return self.buffers[KEYS].shape[2]

    def tensors(self) -> dict[str, Tensor]:
        """The buffers, by the names that a slab has for them."""
        return {CODED + name: t for name, t in self.buffers.items()}

    def keys(self, start: int, stop: int, behind: Tensor | None = None) -> Tensor:
        """Keys as attention reads them [batch, kv_heads, stop - start, key_dim], in new memory;
        exact ones (`behind`) come behind them.
        """
        return self._read(KEYS, start, stop, behind)

    def values(self, start: int, stop: int, behind: Tensor | None = None) -> Tensor:
        """[batch, kv_heads, stop - start, value_dim], as `keys`."""
        return self._read(VALUES, start, stop, behind)

    def masters(self, start: int, stop: int) -> Tensor:
        """Keys as they came, or as attention reads them where they never move."""
        return self._read(MASTERS if MASTERS in self.buffers else KEYS, start, stop)

    def write(self, start: int, keys: Tensor, values: Tensor, *, front: bool) -> None:
        """Quantize keys and values into the slots from `start` on; the front's go to masters."""
        self._write(MASTERS if front and MASTERS in self.buffers else KEYS, start, keys)
        self._write(VALUES, start, values)

    def put(self, start: int, other: QuantizedStorage, *, front: bool) -> None:
        """Copy slots of the same format as they are written; the front's keys go to masters."""
        keys = MASTERS if front and MASTERS in self.buffers else KEYS
        for mine, theirs in ((keys, KEYS), (VALUES, VALUES)):
            for kind in ("", "_peaks"):
                t = other.buffers[theirs + kind]
                self.buffers[mine + kind][:, :, start : start + len(other)] = t

    def part(self, start: int, stop: int, *, said: bool = False) -> QuantizedStorage:
        """Slots `start` to `stop`, as a view without masters; `said`: with these for keys."""
        names = {name: name for name in (KEYS, f"{KEYS}_peaks", VALUES, f"{VALUES}_peaks")}
        if said and MASTERS in self.buffers:
            names |= {KEYS: MASTERS, f"{KEYS}_peaks": f"{MASTERS}_peaks"}
        cut = {name: self.buffers[whence][:, :, start:stop] for name, whence in names.items()}
        return QuantizedStorage(self.format, cut, self.dtype)

    def join(self, other: QuantizedStorage) -> QuantizedStorage:
        """These slots and then others of the same format, both without masters."""
        theirs = other.buffers
        joined = {name: torch.cat([t, theirs[name]], dim=2) for name, t in self.buffers.items()}
        return QuantizedStorage(self.format, joined, self.dtype)

    def unrotated(self) -> QuantizedStorage:
        """These slots, which are read as they are stored: rotated."""
        return QuantizedStorage(self.format.unrotated(), self.buffers, self.dtype)

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedStorage:
        """The same kind of slots, each buffer changed."""
        return QuantizedStorage(
            self.format, {n: change(t) for n, t in self.buffers.items()}, self.dtype
        )

    def write_keys(self, start: int, keys: Tensor) -> None:
        """Quantize the keys that attention reads in slots from `start` on; masters stay."""
        self._write(KEYS, start, keys)

    @property
    def stored(self) -> tuple[tuple[Tensor, Tensor, int], tuple[Tensor, Tensor, int]]:
        """Of keys and of values the numbers [batch, kv_heads, slots, stored], the peaks [batch,
        kv_heads, slots, groups], and the levels of a peak.
        """
        keys, values = (
            (self.buffers[n], self.buffers[f"{n}_peaks"], self._code(n).levels)
            for n in (KEYS, VALUES)
        )
        return keys, values

    def bytes_of(
        self, start: int, stop: int
    ) -> tuple[kernels.QuantizedVectors, kernels.QuantizedVectors] | None:
        """`stored` of some slots if each number is a whole one in a byte with one peak a vector,
        else None.
        """
        if not (whole_bytes(self.format.keys) and whole_bytes(self.format.values)):
            return None
        keys, values = (
            (numbers[:, :, start:stop], peaks[:, :, start:stop], levels)
            for numbers, peaks, levels in self.stored
        )
        return keys, values

    def wrong(self) -> str | None:
        """Why buffers that come from elsewhere cannot be read; None if they can."""
        for name in (KEYS, VALUES, MASTERS):
            if name in self.buffers:
                peaks = self.buffers[f"{name}_peaks"]
                if not bool(((peaks >= 0) & peaks.isfinite()).all()):
                    return f"{CODED}{name}_peaks has numbers that are no peaks"
                if not are_levels(self.buffers[name], self._code(name)):
                    return f"{CODED}{name} has numbers that no level is"
        return None

    def _code(self, name: str) -> Code:
        return self.format.values if name == VALUES else self.format.keys

    def _read(self, name: str, start: int, stop: int, behind: Tensor | None = None) -> Tensor:
        """Slots of a buffer as they are read, and exact ones behind them in the same tensor."""
        numbers, peaks = (self.buffers[n][:, :, start:stop] for n in (name, f"{name}_peaks"))
        code, count = self._code(name), stop - start
        if torch.compiler.is_compiling():
            read = dequantize(numbers, peaks, code, self.dtype)
            return read if behind is None else torch.cat([read, behind], dim=2)
        more = 0 if behind is None else behind.shape[2]
        dim = code.numbers(numbers.shape[3])
        out = peaks.new_empty((*numbers.shape[:2], count + more, dim), dtype=self.dtype)
        dequantize_into(numbers, peaks, code, out[:, :, :count])
        if behind is not None:
            out[:, :, count:] = behind
        return out

    def _write(self, name: str, start: int, x: Tensor) -> None:
        some = slice(start, start + x.shape[2])
        numbers, peaks = (self.buffers[n][:, :, some] for n in (name, f"{name}_peaks"))
        quantize_into(x, self._code(name), numbers, peaks)


def read_slots(
    keys: Tensor, values: Tensor, quantized: QuantizedStorage | None, start: int, stop: int
) -> tuple[Tensor, Tensor]:
    """Read slots `start` to `stop`, quantized ones counted first, as attention does.

    Views where all are exact, otherwise new memory [batch, kv_heads, stop - start, dim].
    """
    first = 0 if quantized is None else len(quantized)
    begin, end = max(0, start - first), max(0, stop - first)
    keys = keys.narrow(2, begin, end - begin)
    values = values.narrow(2, begin, end - begin)
    if quantized is None or start >= first:
        return keys, values
    stop = min(stop, first)
    return quantized.keys(start, stop, keys), quantized.values(start, stop, values)


Piece = QuantizedStorage | tuple[Tensor, Tensor]
"""Slots side by side: quantized, or exact keys and values [batch, kv_heads, n, dim]."""


class QuantizedSlots(Slots):
    """Slots of which some are quantized, as a list of pieces; pools use them like any others.

    Attributes:
        pieces: keys and values as they are stored; None once others were put in their place.
    """

    pieces: list[Piece] | None = None

    @classmethod
    def of(cls, pieces: list[Piece], others: dict[str, Tensor]) -> QuantizedSlots:
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
        return QuantizedSlots.of(found, {n: t[:, :, start:stop] for n, t in self.others().items()})

    def join(self, other: Slots) -> Slots:
        """These slots and then the others."""
        if self.pieces is None or not len(self) or not len(other):
            return super().join(other)
        if isinstance(other, QuantizedSlots) and other.pieces is not None:
            theirs = other.pieces
        else:
            theirs = [(other.keys, other.values)]
        pieces, first = list(self.pieces), theirs[0]
        if isinstance(pieces[-1], QuantizedStorage) and isinstance(first, QuantizedStorage):
            pieces[-1], theirs = pieces[-1].join(first), theirs[1:]
        both = {n: torch.cat([t, getattr(other, n)], dim=2) for n, t in self.others().items()}
        return QuantizedSlots.of([*pieces, *theirs], both)

    def weighed(self, a: Tensor, b: Tensor) -> Slots:
        """The same slots with other log-weights."""
        if self.pieces is None:
            return super().weighed(a, b)
        return QuantizedSlots.of(self.pieces, {**self.others(), "a": a, "b": b})

    def picked(self, index: Tensor) -> Slots:
        """Copies of the slots that `index` names; quantized ones stay as they are stored."""
        if (
            self.pieces is None
            or len(self.pieces) > 1
            or not isinstance(self.pieces[0], QuantizedStorage)
        ):
            return super().picked(index)
        others = {name: pick(t, index) for name, t in self.others().items()}
        return QuantizedSlots.of([self.pieces[0].map(lambda t: pick(t, index))], others)

    def as_stored(self, change: Callable[[Tensor], Tensor]) -> Slots:
        """The same slots, with each tensor they are stored in copied by `change`."""
        if self.pieces is None:
            return self.map(change)
        pieces: list[Piece] = [
            piece.map(change)
            if isinstance(piece, QuantizedStorage)
            else (change(piece[0]), change(piece[1]))
            for piece in self.pieces
        ]
        return QuantizedSlots.of(pieces, {name: change(t) for name, t in self.others().items()})

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
    return len(piece) if isinstance(piece, QuantizedStorage) else piece[0].shape[2]


def _part(piece: Piece, start: int, stop: int) -> Piece:
    """Slots `start` to `stop` of a piece, as a view."""
    if isinstance(piece, QuantizedStorage):
        return piece.part(start, stop)
    return piece[0][:, :, start:stop], piece[1][:, :, start:stop]


def _read(piece: Piece) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return functions that read the keys and the values of a piece."""
    if isinstance(piece, QuantizedStorage):
        return lambda: piece.keys(0, len(piece)), lambda: piece.values(0, len(piece))
    return lambda: piece[0], lambda: piece[1]
