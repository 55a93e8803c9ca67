"""Slots, exact or quantized, as pools receive and return them: views of a slab, or separate
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

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

EMPTY = -1
"""The position of a slot that holds no token."""


_OTHERS = ("a", "b", "position", "mass", "span")
"""The tensors of slots apart from keys and values."""


class SlotBuffers(Protocol):
    """Buffers of which slots can be a view, such as a `Slab`."""

    def run(self, start: int, stop: int) -> Slots:
        """View the slots `start` to `stop`."""


@dataclass
class Slots:
    """Some slots of one layer: a view of a slab's rows, or tokens that move between pools.

    Attributes:
        keys: keys, as attention sees them at their own place in the stream [batch, kv_heads, slots,
            key_dim].
        values: [batch, kv_heads, slots, value_dim].
        a: log-weights in the numerator [batch, kv_heads, slots], float32.
        b: log-weights in the denominator [batch, kv_heads, slots], float32; both are -inf where a
            slot is empty.
        position: places in the stream [batch, kv_heads, slots], int64; -1 where a slot is empty.
        mass: attention received so far (in a slab, up to the last fold) [batch, kv_heads, slots],
            float32; None unless a pool of the pipe asks for it.
        span: where the token, or the image that it is a part of, begins on the axes, and its length
            there [batch, kv_heads, slots, 2], int64; None unless the model has three axes of
            positions and slots are moved.
        slab: the `Slab` of which these slots are a view; None for slots of its front, for slots
            that are not in a slab or are quantized, and for slots whose tensors were replaced
            (`dataclasses.replace`, which is how a pool sets weights).
        place: the first slot of that view in the slab; None without a slab.
    """

    keys: Tensor
    values: Tensor
    a: Tensor
    b: Tensor
    position: Tensor
    mass: Tensor | None = None
    span: Tensor | None = None
    slab: SlotBuffers | None = field(default=None, init=False)
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
        """Return the tensors by name; `mass` and `span` only if they are kept."""
        return {"keys": self.keys, "values": self.values, **self.others()}

    def others(self) -> dict[str, Tensor]:
        """Return all tensors except keys and values, by name."""
        own = vars(self)  # called about twenty times in a fold; `dataclasses.fields` is slow
        return {name: own[name] for name in _OTHERS if own[name] is not None}

    def map(self, change: Callable[[Tensor], Tensor]) -> Slots:
        """Return new slots, with `change` applied to each tensor [batch, kv_heads, slots, ...]. The
        attribute `slab` of the new slots is None.
        """
        return Slots(**{name: change(t) for name, t in self.tensors().items()})

    def of_rows(self, index: Tensor) -> Slots:
        """Return copies of the rows `index` [n] of the batch."""
        return self.map(lambda t: t.index_select(0, index))

    def part(self, start: int, stop: int) -> Slots:
        """Return the slots `start` to `stop` as a view."""
        cut = self.map(lambda t: t[:, :, start:stop])
        if self.place is not None:
            cut.slab, cut.place = self.slab, self.place + start
        return cut

    def take(self, index: Tensor) -> Slots:
        """Return the slots `index` [batch, kv_heads, n]; -1 gives an empty slot."""
        nowhere = index < 0
        try:
            taken = self.picked(index.clamp_min(0))
        except (IndexError, RuntimeError) as error:
            if not index.numel() or (last := int(index.max())) < len(self):
                raise
            raise IndexError(
                f"take() got the index {last}, and there are {len(self)} slots. Use indices from "
                f"0 to {len(self) - 1}, or -1 for an empty slot"
            ) from error
        taken.a = taken.a.masked_fill(nowhere, -torch.inf)
        taken.b = taken.b.masked_fill(nowhere, -torch.inf)
        taken.position = taken.position.masked_fill(nowhere, EMPTY)
        if taken.mass is not None:
            taken.mass = taken.mass.masked_fill(nowhere, 0.0)
        return taken

    def weighed(self, a: Tensor, b: Tensor) -> Slots:
        """Return the same slots with other log-weights."""
        return replace(self, a=a, b=b)

    def picked(self, index: Tensor) -> Slots:
        """Return copies of the slots `index` [batch, kv_heads, n], which must not be negative."""
        return self.map(lambda t: pick(t, index))

    def join(self, other: Slots) -> Slots:
        """Return these slots followed by the others; a view if both are adjacent in one slab."""
        if self.slab is not None and self.slab is other.slab:
            assert self.place is not None
            if self.place + len(self) == other.place:
                return self.slab.run(self.place, self.place + len(self) + len(other))
        if len(other) == 0:
            return self
        if len(self) == 0:
            return other
        theirs = other.tensors()
        return Slots(
            **{name: torch.cat([t, theirs[name]], dim=2) for name, t in self.tensors().items()}
        )

    def only(self, mask: Tensor) -> Slots:
        """Return the tokens where `mask` [batch, kv_heads, slots] is true, in order. Only heads
        with fewer tokens than the fullest head get empty slots.
        """
        mask = mask & self.held
        counts = set(mask.sum(dim=2).flatten().tolist())
        if counts <= {len(self)}:
            return self
        if len(counts) == 1:
            # The usual case: the same number in each head, so no slot is empty.
            index = mask.nonzero()[:, 2].view(*mask.shape[:2], *counts)
            return self.picked(index)
        count = mask.cumsum(dim=2)
        width = max(counts)
        # The target of each token; all others go to a place beyond the last.
        place = (count - 1).where(mask, width)
        order = place.new_full((*place.shape[:2], width + 1), EMPTY)
        steps = torch.arange(len(self), device=place.device).expand_as(place)
        return self.take(order.scatter_(2, place, steps)[:, :, :width])

    def by_position(self) -> Slots:
        """Sort from the oldest token to the newest, with empty slots first."""
        return self.take_sorted(self.position.argsort(dim=2, stable=True))

    def take_sorted(self, order: Tensor) -> Slots:
        """Return all slots in this order [batch, kv_heads, slots]; empty slots stay empty."""
        return self.take(torch.where(self.position.gather(2, order) < 0, EMPTY, order))


def pick(t: Tensor, index: Tensor) -> Tensor:
    """Return the slots `index` [batch, heads, n], not negative, of `t` [batch, heads, slots(,
    dim)].
    """
    if t.ndim == 3:
        return t.gather(2, index)
    batch, heads, _, dim = t.shape
    steps = t.stride()
    if not t.numel() or steps[3] != 1 or any(step % dim for step in steps[:3]):
        return t.gather(2, index[..., None].expand(-1, -1, -1, dim))
    # View the memory of `t` as one long list of vectors, because copying whole vectors is several
    # times as fast as gathering numbers.
    row, head, slot = (step // dim for step in steps[:3])
    last = sum((n - 1) * step for n, step in zip(t.shape[:3], (row, head, slot), strict=True))
    rows = t.as_strided((last + 1, dim), (dim, 1))
    starts = _starts(batch, heads, row, head, t.device)
    index = index if slot == 1 else index * slot
    return rows.index_select(0, (starts + index).flatten()).view(batch, heads, -1, dim)


@lru_cache(maxsize=64)
def _starts(batch: int, heads: int, row: int, head: int, device: torch.device) -> Tensor:
    """Return where the slots of each head begin [batch, heads, 1], int64. `row` and `head` are the
    strides, counted in vectors.
    """
    with torch.inference_mode(False):
        starts = torch.arange(batch, device=device)[:, None] * row
        return (starts + torch.arange(heads, device=device) * head)[..., None]


# --- quantized slots

CODED = "coded."
"""Prefix of the names of a slab's buffers of quantized slots."""
KEYS, VALUES, MASTERS = "keys", "values", "masters"


def quantized_buffers(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select a slab's buffers of quantized slots, by their names in `QuantizedStorage`."""
    return {n.removeprefix(CODED): t for n, t in buffers.items() if n.startswith(CODED)}


class QuantizedStorage:
    """Buffers of quantized slots, a view of them or a copy.

    The keys are those that attention reads. If keys move, there are also *masters*: the original
    keys, quantized once. At each fold, the keys that attention reads are made from the masters
    again. So a key is off by two roundings, however often it has moved.

    Attributes:
        format: the format of the slots.
        buffers: by name [batch, kv_heads, slots, ...]: `keys`, `keys_peaks`, `values`,
            `values_peaks`, and if keys move `masters`, `masters_peaks`. A peak is the largest
            absolute value of a vector, or of a group of its numbers.
        dtype: the dtype of dequantized keys and values.
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
        """Return the buffers, by the names that a slab has for them."""
        return {CODED + name: t for name, t in self.buffers.items()}

    def keys(self, start: int, stop: int, behind: Tensor | None = None) -> Tensor:
        """Return keys as attention reads them [batch, kv_heads, stop - start, key_dim], in new
        memory. The exact keys `behind` follow them in the same tensor.
        """
        return self._read(KEYS, start, stop, behind)

    def values(self, start: int, stop: int, behind: Tensor | None = None) -> Tensor:
        """Return values [batch, kv_heads, stop - start, value_dim], like `keys`."""
        return self._read(VALUES, start, stop, behind)

    def masters(self, start: int, stop: int) -> Tensor:
        """Return the original keys, or the keys that attention reads if they never move."""
        return self._read(MASTERS if MASTERS in self.buffers else KEYS, start, stop)

    def write(self, start: int, keys: Tensor, values: Tensor, *, front: bool) -> None:
        """Quantize keys and values into the slots from `start` on; keys of the front go to
        masters.
        """
        self._write(MASTERS if front and MASTERS in self.buffers else KEYS, start, keys)
        self._write(VALUES, start, values)

    def put(self, start: int, other: QuantizedStorage, *, front: bool) -> None:
        """Copy slots of the same format without conversion; keys of the front go to masters."""
        keys = MASTERS if front and MASTERS in self.buffers else KEYS
        for mine, theirs in ((keys, KEYS), (VALUES, VALUES)):
            for kind in ("", "_peaks"):
                t = other.buffers[theirs + kind]
                self.buffers[mine + kind][:, :, start : start + len(other)] = t

    def part(self, start: int, stop: int, *, said: bool = False) -> QuantizedStorage:
        """Return the slots `start` to `stop` as a view without masters; with `said`, masters
        replace the keys.
        """
        names = {name: name for name in (KEYS, f"{KEYS}_peaks", VALUES, f"{VALUES}_peaks")}
        if said and MASTERS in self.buffers:
            names |= {KEYS: MASTERS, f"{KEYS}_peaks": f"{MASTERS}_peaks"}
        cut = {name: self.buffers[whence][:, :, start:stop] for name, whence in names.items()}
        return QuantizedStorage(self.format, cut, self.dtype)

    def join(self, other: QuantizedStorage) -> QuantizedStorage:
        """Return these slots followed by others of the same format, both without masters."""
        theirs = other.buffers
        joined = {name: torch.cat([t, theirs[name]], dim=2) for name, t in self.buffers.items()}
        return QuantizedStorage(self.format, joined, self.dtype)

    def unrotated(self) -> QuantizedStorage:
        """Return the same slots, to be read without undoing the rotation of their format."""
        return QuantizedStorage(self.format.unrotated(), self.buffers, self.dtype)

    def map(self, change: Callable[[Tensor], Tensor]) -> QuantizedStorage:
        """Return the same kind of slots, with each buffer changed."""
        return QuantizedStorage(
            self.format, {n: change(t) for n, t in self.buffers.items()}, self.dtype
        )

    def write_keys(self, start: int, keys: Tensor) -> None:
        """Quantize the keys that attention reads in slots from `start` on; masters stay."""
        self._write(KEYS, start, keys)

    @property
    def stored(self) -> tuple[tuple[Tensor, Tensor, int], tuple[Tensor, Tensor, int]]:
        """Return keys and values as they are stored: for each, the numbers [batch, kv_heads, slots,
        stored], the peaks [batch, kv_heads, slots, groups], and how many levels a peak is divided
        into.
        """
        keys, values = (
            (self.buffers[n], self.buffers[f"{n}_peaks"], self._code(n).levels)
            for n in (KEYS, VALUES)
        )
        return keys, values

    def bytes_of(
        self, start: int, stop: int
    ) -> tuple[kernels.QuantizedVectors, kernels.QuantizedVectors] | None:
        """Return the part of `stored` for the slots `start` to `stop`. None unless each number is a
        whole number in a byte and each vector has one peak.
        """
        if not (whole_bytes(self.format.keys) and whole_bytes(self.format.values)):
            return None
        keys, values = (
            (numbers[:, :, start:stop], peaks[:, :, start:stop], levels)
            for numbers, peaks, levels in self.stored
        )
        return keys, values

    def wrong(self) -> str | None:
        """Return why buffers, such as those of a session file, are not valid; None if they are."""
        for name in (KEYS, VALUES, MASTERS):
            if name in self.buffers:
                peaks = self.buffers[f"{name}_peaks"]
                if not bool(((peaks >= 0) & peaks.isfinite()).all()):
                    return f"{CODED}{name}_peaks has numbers that are not valid peaks"
                if not are_levels(self.buffers[name], self._code(name)):
                    return f"{CODED}{name} has numbers that are not valid levels"
        return None

    def _code(self, name: str) -> Code:
        return self.format.values if name == VALUES else self.format.keys

    def _read(self, name: str, start: int, stop: int, behind: Tensor | None = None) -> Tensor:
        """Dequantize slots of a buffer, and put exact ones after them in the same tensor."""
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
    """Read the slots `start` to `stop` as attention does; quantized slots are counted first.

    Returns views if all are exact, otherwise new memory [batch, kv_heads, stop - start, dim].
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
"""Adjacent slots: quantized ones, or exact keys and values [batch, kv_heads, n, dim]."""


class QuantizedSlots(Slots):
    """Slots of which some are quantized, as a list of pieces. Pools use them like any other slots.

    Attributes:
        pieces: keys and values as they are stored; None after they were replaced.
    """

    pieces: list[Piece] | None = None

    @classmethod
    def of(cls, pieces: list[Piece], others: dict[str, Tensor]) -> QuantizedSlots:
        """Make slots of one or more pieces; `others` has all tensors except keys and values."""
        made = object.__new__(cls)
        vars(made).update({"mass": None, "span": None, "slab": None, "place": None} | others)
        made.pieces = pieces
        return made

    @property
    def keys(self) -> Tensor:
        """As in `Slots`; dequantized at first use."""
        return self._numbers("_keys", 0)

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self._put("_keys", keys)

    @property
    def values(self) -> Tensor:
        """As in `Slots`; dequantized at first use."""
        return self._numbers("_values", 1)

    @values.setter
    def values(self, values: Tensor) -> None:
        self._put("_values", values)

    def part(self, start: int, stop: int) -> Slots:
        """Return the slots `start` to `stop` as a view of the stored tensors."""
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
        """Return these slots followed by the others."""
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
        """Return the same slots with other log-weights."""
        if self.pieces is None:
            return super().weighed(a, b)
        return QuantizedSlots.of(self.pieces, {**self.others(), "a": a, "b": b})

    def picked(self, index: Tensor) -> Slots:
        """Return copies of the slots `index`. They stay quantized if all slots are one quantized
        piece.
        """
        if (
            self.pieces is None
            or len(self.pieces) > 1
            or not isinstance(self.pieces[0], QuantizedStorage)
        ):
            return super().picked(index)
        others = {name: pick(t, index) for name, t in self.others().items()}
        return QuantizedSlots.of([self.pieces[0].map(lambda t: pick(t, index))], others)

    def as_stored(self, change: Callable[[Tensor], Tensor]) -> Slots:
        """Return the same slots, with `change` applied to each stored tensor."""
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
        """Return the keys (place 0) or the values (1), cached under a name."""
        own = vars(self)
        if name not in own:
            assert self.pieces is not None
            read = [_read(piece)[place]() for piece in self.pieces]
            own[name] = read[0] if len(read) == 1 else torch.cat(read, dim=2)
        numbers: Tensor = own[name]
        return numbers

    def _put(self, name: str, t: Tensor) -> None:
        """Replace the stored keys or values."""
        if self.pieces is not None:
            _ = self.keys, self.values
            self.pieces = None
        vars(self)[name] = t


def _length(piece: Piece) -> int:
    return len(piece) if isinstance(piece, QuantizedStorage) else piece[0].shape[2]


def _part(piece: Piece, start: int, stop: int) -> Piece:
    """Return the slots `start` to `stop` of a piece as a view."""
    if isinstance(piece, QuantizedStorage):
        return piece.part(start, stop)
    return piece[0][:, :, start:stop], piece[1][:, :, start:stop]


def _read(piece: Piece) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """Return functions that read the keys and the values of a piece."""
    if isinstance(piece, QuantizedStorage):
        return lambda: piece.keys(0, len(piece)), lambda: piece.values(0, len(piece))
    return lambda: piece[0], lambda: piece[1]
