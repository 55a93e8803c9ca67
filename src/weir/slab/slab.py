"""The slots of one layer: fixed buffers, and the parts of them that pools pass around.

Knows nothing about policies, models or how attention is computed.

A row of the slab lies like this, from slot 0 on::

    | front: pools whose tokens lost their neighbors | run: recent tokens, unbroken | tail | free |

Where pools have quantized slots, these come first, as many as there may be: those of the front,
those of the run, and empty ones. Behind them are the exact ones, as above.

The *tail* holds what came since the last fold. Keys of the run and of the tail are rotated once, at
their place in the stream, and stay as they are. Keys of the front move closer to the present as the
stream goes on: what attention reads is made anew from a *master* at each fold, so that no error
adds up.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weir.slab.attention import split_weights
from weir.slab.quantization import Format
from weir.slab.quantized_slots import Piece, QuantizedSlots, QuantizedStorage, read_slots
from weir.slab.selection import AttendedSlots
from weir.slab.slots import EMPTY, Slots
from weir.slab.spec import STATE, Heads, SlabSpec

_BUFFERS = (
    *("keys", "values", "a", "b", "position", "mass", "span"),
    *("masters", "mask", "numerator", "denominator", "frame", "queries"),
)
_FILL = {"a": -math.inf, "b": -math.inf, "mask": -math.inf, "position": EMPTY}
"""What a slot without a token holds; everything else is zero."""


class Slab:
    """The buffers of one layer, made once.

    Attributes:
        keys: what attention reads of exact slots [batch, kv_heads, slots, key_dim].
        values: of exact slots [batch, kv_heads, slots, value_dim].
        coded: keys and values of quantized slots; None where there are none.
        masters: keys of the front as they were said [batch, kv_heads, front, key_dim]; None where
            keys never move (`positions="original"`, or a model without RoPE).
        mask, numerator, denominator: a and b as attention reads them (`split_weights`)
            [batch, kv_heads, slots], for pipes that use two weights; None otherwise.
        frame: the positions attention pretends [batch, kv_heads, slots], int64, where its bias
            needs them (ALiBi); None otherwise.
        queries: those that the next fold is going to ask for, the last one last, as attention saw
            them [batch, kv_heads, queries, group * key_dim]; None unless a pool asks for them or
            for the attention received.
        state: what pools remember beside their slots, by a name [batch, kv_heads, ...].
        a, b, position, mass, span: as in `Slots`.
    """

    def __init__(self, spec: SlabSpec, batch: int, device: torch.device | None = None) -> None:
        """Buffers for a batch, without a token; what pools remember is theirs to fill in."""
        # Never inference tensors: the same slab is written in and outside inference mode.
        with torch.inference_mode(False):
            made = {
                name: allocate(shape, dtype, device)
                for name, (shape, dtype) in spec.tensors(batch).items()
                if not name.startswith(STATE)
            }
            for name, t in made.items():
                t.fill_(_FILL[name]) if name in _FILL else t.zero_()
        self.quantized = QuantizedStorage.of(spec.format, made, spec.heads.dtype)
        self.keys, self.values = made["keys"], made["values"]
        self.a, self.b, self.position = made["a"], made["b"], made["position"]
        self.mass, self.span = made.get("mass"), made.get("span")
        self.masters = made.get("masters")
        self.mask = made.get("mask")
        self.numerator, self.denominator = made.get("numerator"), made.get("denominator")
        self.frame = made.get("frame")
        self.queries = made.get("queries")
        self.state: dict[str, Tensor] = {}

    @classmethod
    def of(cls, buffers: dict[str, Tensor], format: Format | None = None) -> Slab:
        """A slab made of buffers that `tensors` named, its quantized slots in that format."""
        slab = object.__new__(cls)
        slab.quantized = QuantizedStorage.of(format, buffers, buffers["keys"].dtype)
        for name in _BUFFERS:
            setattr(slab, name, buffers.get(name))
        slab.state = {
            name.removeprefix(STATE): t for name, t in buffers.items() if name.startswith(STATE)
        }
        return slab

    def __len__(self) -> int:
        return self.position.shape[2]

    def tensors(self) -> dict[str, Tensor]:
        """The buffers by name, and what pools remember."""
        return {**self._buffers(), **{STATE + name: t for name, t in self.state.items()}}

    def _buffers(self) -> dict[str, Tensor]:
        own = {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}
        return own if self.quantized is None else own | self.quantized.tensors()

    def _like(self, change: Callable[[Tensor], Tensor]) -> Slab:
        """A slab of the same kind, each of its tensors made from this one's."""
        format = None if self.quantized is None else self.quantized.format
        return Slab.of({name: change(t) for name, t in self.tensors().items()}, format)

    @property
    def first(self) -> int:
        """The first exact slot: so many quantized ones are in front."""
        return 0 if self.quantized is None else len(self.quantized)

    @property
    def split(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(mask, numerator, denominator), for `split_attention`; None for pipes of one weight."""
        if self.mask is None or self.numerator is None or self.denominator is None:
            return None
        return self.mask, self.numerator, self.denominator

    def heads(self, group: int) -> Heads:
        """The sizes of the attention it is for, of `group` query heads to each head of keys."""
        keys, values = self.keys, self.values
        return Heads(keys.shape[1], group, keys.shape[3], values.shape[3], keys.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for t in self.tensors().values())

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of slots as attention reads them; a view where all are exact."""
        return read_slots(self.keys, self.values, self.quantized, start, stop)

    def attended(self, start: int, stop: int, *, plain: bool = False) -> AttendedSlots:
        """Slots as a call of attention reads them."""
        held = self.keys, self.values, self.quantized, self.a, self.b, self.split
        return AttendedSlots(*held, start, stop, plain)

    def run(self, start: int, stop: int) -> Slots:
        """Slots of the run or of the tail, as a view."""
        view = Slots(
            *self.read(max(start, self.first), max(stop, self.first)),
            a=self.a[:, :, start:stop],
            b=self.b[:, :, start:stop],
            position=self.position[:, :, start:stop],
            mass=None if self.mass is None else self.mass[:, :, start:stop],
            span=None if self.span is None else self.span[:, :, start:stop],
        )
        if self.quantized is not None and start < self.first:
            pieces: list[Piece] = [self.quantized.part(start, stop)]
            if stop > self.first:
                pieces.append((view.keys, view.values))
            return QuantizedSlots.of(pieces, view.others())
        view.slab, view.place = self, start
        return view

    def storages(self) -> set[int]:
        """Where the memory of its buffers begins, as `copy_if_shared` asks for it."""
        return {t.untyped_storage().data_ptr() for t in self._buffers().values()}

    def front(self, start: int, stop: int) -> Slots:
        """Slots of the front, with their master keys; a view."""
        slots = self.run(start, stop)
        slots.slab = slots.place = None
        if self.quantized is not None and start < self.first:
            return QuantizedSlots.of([self.quantized.part(start, stop, said=True)], slots.others())
        if self.masters is not None:
            slots.keys = self.masters[:, :, start - self.first : stop - self.first]
        return slots

    def append(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Put keys and values [batch, kv_heads, n, dim] into every row's slots from `start` on."""
        # In every step of every layer: a narrowed copy costs half of what an index does.
        count, start = keys.shape[2], start - self.first
        self.keys.narrow(2, start, count).copy_(keys)
        self.values.narrow(2, start, count).copy_(values)

    def append_each(self, keys: Tensor, values: Tensor, lines: Tensor) -> None:
        """Put one token of each row, [batch, kv_heads, 1, dim], where `slot_lines` says.

        The lines are those of the slots in a buffer as long as `keys`.
        """
        if self.first:
            lines = lines - self.first
        put_lines(self.keys, keys, lines)
        put_lines(self.values, values, lines)

    def store_queries(self, queries: Tensor, start: int) -> None:
        """Keep queries [batch, kv_heads, group, n, key_dim] from place `start` on."""
        assert self.queries is not None
        self.queries.narrow(2, start, queries.shape[3]).copy_(merge_groups(queries))

    def store_queries_each(self, queries: Tensor, lines: Tensor) -> None:
        """Keep one query of each row where `slot_lines` of the queries' buffer says."""
        assert self.queries is not None
        put_lines(self.queries, merge_groups(queries), lines)

    def store_queries_at(
        self, queries: Tensor, rows: Tensor, places: Tensor, columns: Tensor
    ) -> None:
        """Keep the query of column `columns[i]` of row `rows[i]` at `places[i]`, for all i."""
        assert self.queries is not None
        self.queries[rows, :, places] = merge_groups(queries)[rows, :, columns]

    def append_at(
        self, keys: Tensor, values: Tensor, rows: Tensor, slots: Tensor, columns: Tensor
    ) -> None:
        """Put `keys[rows[i], :, columns[i]]` into slot `slots[i]` of row `rows[i]`, for all i."""
        self.keys[rows, :, slots - self.first] = keys[rows, :, columns]
        self.values[rows, :, slots - self.first] = values[rows, :, columns]

    def write(self, start: int, slots: Slots, *, front: bool) -> None:
        """Overwrite from slot `start` on; the front's keys go to the masters."""
        stop, first = start + len(slots), self.first
        if self.quantized is not None and start < first:
            self._write_quantized(self.quantized, start, slots, front=front)
        else:
            keys = self.masters if front and self.masters is not None else self.keys
            keys[:, :, start - first : stop - first] = slots.keys
            self.values[:, :, start - first : stop - first] = slots.values
        for name, t in slots.others().items():
            getattr(self, name)[:, :, start:stop] = t
        if self.split is not None:
            for buffer, t in zip(self.split, split_weights(slots.a, slots.b), strict=True):
                buffer[:, :, start:stop] = t

    def _write_quantized(
        self, quantized: QuantizedStorage, start: int, slots: Slots, *, front: bool
    ) -> None:
        """Keys and values of quantized slots: those that are so stored as they are."""
        if isinstance(slots, QuantizedSlots) and slots.pieces is not None:
            pieces = slots.pieces
        else:
            pieces = [(slots.keys, slots.values)]
        for piece in pieces:
            if isinstance(piece, QuantizedStorage):
                quantized.put(start, piece, front=front)
                start += len(piece)
            else:
                quantized.write(start, *piece, front=front)
                start += piece[0].shape[2]

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
        for weights in (self.a, self.b, self.mask):
            if weights is not None:
                weights[:, :, start:stop] = 0.0
        for factors in (self.numerator, self.denominator):
            if factors is not None:
                factors[:, :, start:stop] = 1.0
        if self.mass is not None:
            self.mass[:, :, start:stop] = 0.0
        self.empty(stop, len(self))

    def empty(self, start: int, stop: int) -> None:
        """Let slots hold no token."""
        if start >= stop:
            return
        for name in ("a", "b", "position", "mass", "mask", "numerator", "denominator"):
            t = getattr(self, name)
            if t is not None:
                t[:, :, start:stop] = _FILL.get(name, 0)

    def copy(self) -> Slab:
        """A slab of its own with the same content."""
        with torch.inference_mode(False):
            return self._like(Tensor.clone)

    def view(self, start: int, stop: int) -> Slab:
        """The rows `start` to `stop`, as a view: what is written there is written here."""
        return self._like(lambda t: t[start:stop])

    def clear(self, row: int) -> None:
        """Empty a row; what pools remember of it is left to them."""
        for name, t in self._buffers().items():
            t[row].fill_(_FILL.get(name, 0))

    def scrub(self, row: int, start: int, stop: int) -> None:
        """Zero what is no number in slots that may wait for tokens; weights and places stay."""
        for t in (self.keys, self.values):
            some = t[row, :, start - self.first : stop - self.first]
            some.masked_fill_(~some.isfinite(), 0.0)

    def rows(self, index: Tensor) -> Slab:
        """A slab that holds copies of the rows `index` [n]."""
        with torch.inference_mode(False):
            return self._like(lambda t: t.index_select(0, index))

    def put_row(self, row: int, tensors: dict[str, Tensor]) -> None:
        """Overwrite a row by one that `tensors` of a slab of one row holds, of the same sizes."""
        for name, t in self.tensors().items():
            t[row].copy_(tensors[name][0])

    def put_rows(self, index: Tensor, other: Slab) -> None:
        """Write the rows of `other` back to the rows `index` [n]."""
        self.lengthen_state(other)
        theirs = other.tensors()
        for name, t in self.tensors().items():
            t.index_copy_(0, index, theirs[name])

    def lengthen_state(self, other: Slab) -> None:
        """Make what pools remember as long as in `other`; for pipes without a limit only."""
        with torch.inference_mode(False):
            for name, t in self.state.items():
                if is_longer(other.state[name], t):
                    more = other.state[name].shape[2] - t.shape[2]
                    behind = t.new_zeros((*t.shape[:2], more, *t.shape[3:]))
                    self.state[name] = torch.cat([t, behind], dim=2)

    def grow(self, slots: int, masters: int = 0) -> None:
        """Replace the buffers that are smaller by larger ones; for pipes without a limit only."""
        with torch.inference_mode(False):
            for name, t in self._buffers().items():
                if name == "queries":
                    continue
                size = masters if name == "masters" else slots
                if size <= t.shape[2]:
                    continue
                larger = t.new_full((*t.shape[:2], size, *t.shape[3:]), _FILL.get(name, 0))
                larger[:, :, : t.shape[2]] = t
                setattr(self, name, larger)


def slot_lines(slots: Tensor, kv_heads: int, size: int) -> Tensor:
    """Where one slot of each row lies in a buffer seen as one long list of lines.

    Args:
        slots: of each row [batch], int64.
        kv_heads: heads of the buffer.
        size: slots of a row of the buffer.

    Returns:
        [batch * kv_heads], int64.
    """
    heads = torch.arange(slots.shape[0] * kv_heads, device=slots.device).view(-1, kv_heads)
    return (heads * size + slots[:, None]).flatten()


def put_lines(buffer: Tensor, t: Tensor, lines: Tensor) -> None:
    """Write `t` [batch, kv_heads, 1, dim] to lines of `buffer` [batch, kv_heads, slots, dim]."""
    # Whole lines by one index: several times as fast as an index for rows and one for slots.
    dim = buffer.shape[3]
    buffer.view(-1, dim).index_copy_(0, lines, t.reshape(-1, dim))


def merge_groups(queries: Tensor) -> Tensor:
    """[batch, kv_heads, group, n, key_dim] to [batch, kv_heads, n, group * key_dim]."""
    return queries.transpose(2, 3).flatten(3)


def copy_if_shared(slots: Slots, shared: set[int]) -> Slots:
    """The same slots, in memory of their own where theirs begins at one of the `shared` places.

    What is to be written somewhere in a slab may be what has to be read elsewhere.
    """

    def own(t: Tensor) -> Tensor:
        return t.clone() if t.untyped_storage().data_ptr() in shared else t

    return slots.as_stored(own) if isinstance(slots, QuantizedSlots) else slots.map(own)


def is_longer(t: Tensor, than: Tensor) -> bool:
    """Whether the slots, or what a pool remembers one by one, are more than those of the other."""
    if t.ndim != than.ndim or t.ndim < 3:
        return False
    return t.shape[2] > than.shape[2] and t.shape[3:] == than.shape[3:]


LARGE_PAGE = 2**21
"""Bytes of a large page, as x86 and most ARM processors have them."""


def allocate(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """`torch.empty`, for what is kept for long and read often.

    A large page may hold the end of one tensor and the beginning of the next, if all of them are
    made before anything is written to one.
    """
    made = torch.empty(shape, dtype=dtype, device=device)
    real = type(made) is Tensor and made.device.type == "cpu"  # others have no address
    if real and made.nbytes >= LARGE_PAGE // 2:
        _advise_large_pages(made)
    return made


def _advise_large_pages(t: Tensor) -> None:
    """For large pages; whoever has none refuses, and all stays as it is."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return
    usual = mmap.PAGESIZE
    start = -(-t.data_ptr() // usual) * usual
    size = (t.data_ptr() + t.nbytes) // usual * usual - start
    advise = ctypes.CDLL(None).madvise
    advise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_HUGEPAGE))
