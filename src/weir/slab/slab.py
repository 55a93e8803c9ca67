"""The slots of one layer: fixed buffers, and views of them for pools.

The layout of a row, from slot 0 on::

    | front: pools whose tokens lost their neighbors | run: recent tokens, unbroken | tail | free |

If pools have quantized slots, these come first, in a region of fixed size: those of the front,
those of the run, and empty ones. The *tail* holds the tokens since the last fold. Keys of the run
and of the tail are rotated once, to their place in the stream. Each fold rotates the keys of the
front to new positions, always from a *master*, the original key, so that errors do not accumulate.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from weir.slab.attention import split_weights
from weir.slab.quantization import Format
from weir.slab.selection import AttendedSlots
from weir.slab.slots import EMPTY, Piece, QuantizedSlots, QuantizedStorage, Slots, read_slots
from weir.slab.spec import STATE, Heads, SlabSpec

_BUFFERS = (
    *("keys", "values", "a", "b", "position", "mass", "span"),
    *("masters", "mask", "numerator", "denominator", "frame", "queries"),
)
SLOT_BUFFERS = tuple(n for n in _BUFFERS if n not in ("keys", "values", "masters", "queries"))
"""Buffers with an entry for each slot, including quantized ones."""
_SILENT = (("mask", -math.inf), ("numerator", 0), ("denominator", 0))
"""The values of the buffers for `split_attention` in slots without weight."""
_FILL = {"a": -math.inf, "b": -math.inf, "mask": -math.inf, "position": EMPTY}
"""The content of a slot without a token; other buffers are zero."""


class Slab:
    """The buffers of one layer, allocated once.

    Attributes:
        keys: the keys of exact slots, as attention reads them [batch, kv_heads, slots, key_dim].
        values: the values of exact slots [batch, kv_heads, slots, value_dim].
        quantized: keys and values of quantized slots; None if there are none.
        masters: original keys of the exact slots of the front [batch, kv_heads, masters, key_dim];
            None if there are no such slots, or if keys never move (`positions="original"`, or a
            model without RoPE).
        mask, numerator, denominator: a and b in the form of `split_weights` [batch, kv_heads,
            slots], for pipes that use two weights; None otherwise.
        frame: positions in the rolling frame [batch, kv_heads, slots], int64, for a bias that needs
            them (ALiBi); None otherwise.
        queries: the queries that the next fold reads, in order, as attention saw them
            [batch, kv_heads, queries, group * key_dim]; None unless a pool asks for them or
            for the attention received.
        state: the state of pools, in addition to the slots, by name [batch, kv_heads, ...].
        a, b, position, mass, span: as in `Slots`.
    """

    _last_view: tuple[list[object], Slab] | None = None

    def __init__(self, spec: SlabSpec, batch: int, device: torch.device | None = None) -> None:
        """Allocate empty buffers for a batch; the caller sets the pools' state."""
        # These must not be inference tensors, because the same slab is written inside and outside
        # inference mode.
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
        """Make a slab from buffers that are named as in `tensors`; `format` is the format of
        quantized slots.
        """
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
        """Return the buffers by name, and the pools' state."""
        return {**self._buffers(), **{STATE + name: t for name, t in self.state.items()}}

    def _buffers(self) -> dict[str, Tensor]:
        own = {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}
        return own if self.quantized is None else own | self.quantized.tensors()

    def _like(self, change: Callable[[Tensor], Tensor]) -> Slab:
        """Make a slab of the same kind, with `change` applied to each tensor."""
        format = None if self.quantized is None else self.quantized.format
        return Slab.of({name: change(t) for name, t in self.tensors().items()}, format)

    @property
    def first(self) -> int:
        """The first exact slot, which is the number of quantized ones."""
        return 0 if self.quantized is None else len(self.quantized)

    @property
    def split(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """(mask, numerator, denominator), for `split_attention`; None for pipes of one weight."""
        if self.mask is None or self.numerator is None or self.denominator is None:
            return None
        return self.mask, self.numerator, self.denominator

    def heads(self, group: int) -> Heads:
        """Return the sizes of the layer's attention, with `group` query heads for each KV head."""
        keys, values = self.keys, self.values
        return Heads(keys.shape[1], group, keys.shape[3], values.shape[3], keys.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(t.nbytes for t in self.tensors().values())

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values as attention reads them; views if all slots are exact."""
        return read_slots(self.keys, self.values, self.quantized, start, stop)

    def attended(self, start: int, stop: int, *, plain: bool = False) -> AttendedSlots:
        """Return slots as a call of attention reads them."""
        held = self.keys, self.values, self.quantized, self.a, self.b, self.split
        return AttendedSlots(*held, start, stop, plain)

    def run(self, start: int, stop: int) -> Slots:
        """View slots of the run or of the tail."""
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
        """Return the addresses of the buffers' memory, for `copy_if_shared`."""
        return {t.untyped_storage().data_ptr() for t in self._buffers().values()}

    def front(self, start: int, stop: int) -> Slots:
        """View slots of the front, with their master keys."""
        slots = self.run(start, stop)
        slots.slab = slots.place = None
        if self.quantized is not None and start < self.first:
            return QuantizedSlots.of([self.quantized.part(start, stop, said=True)], slots.others())
        if self.masters is not None:
            slots.keys = self.masters[:, :, start - self.first : stop - self.first]
        return slots

    def append(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Put keys and values [batch, kv_heads, n, dim] into every row's slots from `start` on."""
        # This runs in every step of every layer, and `narrow` takes half the time of an index.
        count, start = keys.shape[2], start - self.first
        self.keys.narrow(2, start, count).copy_(keys)
        self.values.narrow(2, start, count).copy_(values)

    def append_each(self, keys: Tensor, values: Tensor, lines: Tensor) -> None:
        """Put one token of each row [batch, kv_heads, 1, dim] into a slot of the row.

        Args:
            keys: the keys.
            values: the values.
            lines: what `slot_lines` returns for these slots if its `size` is the number of slots in
                `self.keys`. Slots are numbered from the first quantized slot on.
        """
        if self.first:
            lines = lines - self.first
        put_lines(self.keys, keys, lines)
        put_lines(self.values, values, lines)

    def store_queries(self, queries: Tensor, start: int) -> None:
        """Store queries [batch, kv_heads, group, n, key_dim] in `queries`, from `start` on."""
        assert self.queries is not None
        self.queries.narrow(2, start, queries.shape[3]).copy_(merge_groups(queries))

    def append_at(
        self, keys: Tensor, values: Tensor, rows: Tensor, slots: Tensor, columns: Tensor
    ) -> None:
        """Put `keys[rows[i], :, columns[i]]` into slot `slots[i]` of row `rows[i]`, for all i."""
        self.keys[rows, :, slots - self.first] = keys[rows, :, columns]
        self.values[rows, :, slots - self.first] = values[rows, :, columns]

    def write(self, start: int, slots: Slots, *, front: bool) -> None:
        """Overwrite slots from `start` on; keys of the front go to the masters."""
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
        """Write quantized keys and values; slots already quantized are copied as stored."""
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
        """Prepare `chunk` slots from `start` on for the next tokens, and empty all later slots.

        The prepared slots already get the positions of their tokens, counted from the position of
        each row's next token, `seen` [batch]. Until a slot has its token, its position is in the
        future of every query.
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
        """Empty slots `start` to `stop`."""
        if start >= stop:
            return
        for name in ("a", "b", "position", "mass", "mask", "numerator", "denominator"):
            t = getattr(self, name)
            if t is not None:
                t[:, :, start:stop] = _FILL.get(name, 0)

    def copy(self) -> Slab:
        """Copy the slab."""
        with torch.inference_mode(False):
            return self._like(Tensor.clone)

    def view(self, start: int, stop: int) -> Slab:
        """View the rows `start` to `stop`; writes go to this slab."""
        return self._like(lambda t: t[start:stop])

    def same_view(self, start: int, stop: int) -> Slab:
        """Return a `view`: the object of the last call, if the rows are the same and no buffer has
        been replaced, because a native step may have been prepared for this object. The caller must
        not replace buffers of the view.
        """
        held = [start, stop, *self.tensors().values()]
        if self._last_view is not None:
            before, view = self._last_view
            if len(held) == len(before) and all(map(operator.is_, held, before)):
                return view
        with torch.inference_mode(False):  # it may be written inside and outside inference mode
            self._last_view = held, self.view(start, stop)
        return self._last_view[1]

    def clear(self, row: int) -> None:
        """Empty a row, except for the pools' state."""
        for name, t in self._buffers().items():
            t[row].fill_(_FILL.get(name, 0))

    def drop(self, row: int, gone: Tensor, emptied: Tensor) -> None:
        """Zero the keys and values of some slots of a row, take their weight away, and mark some of
        these slots as empty.

        Args:
            row: the row.
            gone: the slots to zero [kv_heads, slots], bool.
            emptied: the slots among `gone` that no longer hold any token [kv_heads, slots], bool.
        """
        coded = gone[:, : self.first]
        for t in (self.keys, self.values):
            t[row].masked_fill_(gone[:, self.first :, None], 0)
        if self.masters is not None:
            exact = gone[:, self.first : self.first + self.masters.shape[2]]
            self.masters[row, :, : exact.shape[1]].masked_fill_(exact[..., None], 0)
        if self.quantized is not None:
            for t in self.quantized.buffers.values():
                t[row].masked_fill_(coded[:, : t.shape[2], None], 0)
        for name, fill in (("a", -math.inf), ("b", -math.inf), ("mass", 0), *_SILENT):
            weights = getattr(self, name)
            if weights is not None:
                weights[row].masked_fill_(gone, fill)
        self.position[row].masked_fill_(emptied, EMPTY)

    def scrub(self, row: int, start: int, stop: int) -> None:
        """Zero non-finite keys and values in slots; weights and positions stay."""
        for t in (self.keys, self.values):
            some = t[row, :, start - self.first : stop - self.first]
            some.masked_fill_(~some.isfinite(), 0.0)

    def rows(self, index: Tensor) -> Slab:
        """Copy the rows `index` [n] into a new slab."""
        with torch.inference_mode(False):
            return self._like(lambda t: t.index_select(0, index))

    def put_row(
        self, row: int, tensors: dict[str, Tensor], held: Mapping[str, tuple[slice, ...]]
    ) -> None:
        """Overwrite a row with the contents of another slab of one row, and empty all other slots.

        Args:
            row: the row.
            tensors: the buffers of the other slab, cut to the slots in use (`cut_slots`).
            held: for each buffer that was cut, the slots that are in use.
        """
        for name, t in self.tensors().items():
            if name not in held:
                put_first(t[row : row + 1], tensors[name])
                continue
            if name in SLOT_BUFFERS:
                t[row].fill_(_FILL.get(name, 0))
            given, at = tensors[name], 0
            for part in held[name]:
                count = part.stop - part.start
                t[row, :, part] = given[0, :, at : at + count]
                at += count

    def put_rows(self, index: Tensor, other: Slab) -> None:
        """Write the rows of `other` back to the rows `index` [n]."""
        theirs = other.tensors()
        self.lengthen_state(theirs)
        for name, t in self.tensors().items():
            t.index_copy_(0, index, theirs[name])

    def lengthen_state(self, others: Mapping[str, Tensor]) -> None:
        """Lengthen the pools' state to the length that it has in `others`. Only pipes without a
        limit need this.
        """
        with torch.inference_mode(False):
            for name, t in self.state.items():
                if is_longer(others[STATE + name], t):
                    more = others[STATE + name].shape[2] - t.shape[2]
                    behind = t.new_zeros((*t.shape[:2], more, *t.shape[3:]))
                    self.state[name] = torch.cat([t, behind], dim=2)

    def grow(self, slots: int, masters: int = 0) -> None:
        """Replace buffers that are too small by larger ones, for `slots` slots and `masters`
        masters. The number of quantized slots does not change.
        """
        self._last_view = None
        own = {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}
        exact = slots - self.first
        with torch.inference_mode(False):
            for name, t in own.items():
                if name == "queries":
                    continue
                size = exact if name in ("keys", "values") else slots
                size = masters if name == "masters" else size
                if size <= t.shape[2]:
                    continue
                larger = t.new_full((*t.shape[:2], size, *t.shape[3:]), _FILL.get(name, 0))
                larger[:, :, : t.shape[2]] = t
                setattr(self, name, larger)


def slot_lines(slots: Tensor, kv_heads: int, size: int) -> Tensor:
    """Return the lines of one slot of each row: from `slots` [batch] to [batch * kv_heads], int64.

    If a buffer with `size` slots for each KV head of each row is viewed as one long list, a line is
    the index of one slot and KV head in it, as in `put_lines`.
    """
    heads = torch.arange(slots.shape[0] * kv_heads, device=slots.device).view(-1, kv_heads)
    return (heads * size + slots[:, None]).flatten()


def put_lines(buffer: Tensor, t: Tensor, lines: Tensor) -> None:
    """Write `t` [batch, kv_heads, 1, dim] to lines of `buffer` [batch, kv_heads, slots, dim]."""
    # One index of whole lines is several times as fast as two indexes, for rows and slots.
    dim = buffer.shape[3]
    buffer.view(-1, dim).index_copy_(0, lines, t.reshape(-1, dim))


def merge_groups(queries: Tensor) -> Tensor:
    """Reshape [batch, kv_heads, group, n, key_dim] to [batch, kv_heads, n, group * key_dim]."""
    return queries.transpose(2, 3).flatten(3)


def copy_if_shared(slots: Slots, shared: set[int]) -> Slots:
    """Copy the tensors of slots whose memory begins at one of the `shared` addresses."""

    def own(t: Tensor) -> Tensor:
        return t.clone() if t.untyped_storage().data_ptr() in shared else t

    return slots.as_stored(own) if isinstance(slots, QuantizedSlots) else slots.map(own)


def cut_slots(t: Tensor, parts: tuple[slice, ...] | None) -> Tensor:
    """Restrict a buffer [batch, kv_heads, slots, ...] to some slots; None for all."""
    if parts is None or t.dim() < 3:
        return t
    found = [t[:, :, part] for part in parts]
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def put_first(t: Tensor, given: Tensor) -> None:
    """Copy pool state into a buffer that may have grown longer; the rest is zero."""
    if t.shape != given.shape:
        t.zero_()
        t = t[:, :, : given.shape[2]]
    t.copy_(given)


def is_longer(t: Tensor, than: Tensor) -> bool:
    """Return whether `t` has more slots, or entries of pool state, than `than`."""
    if t.ndim != than.ndim or t.ndim < 3:
        return False
    return t.shape[2] > than.shape[2] and t.shape[3:] == than.shape[3:]


LARGE_PAGE = 2**21
"""Bytes of a large page on x86 and most ARM processors."""


def allocate(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Call `torch.empty` with memory on large pages, for tensors that live long and are read
    often.
    """
    made = torch.empty(shape, dtype=dtype, device=device)
    real = type(made) is Tensor and made.device.type == "cpu"  # others have no address
    if real and made.nbytes >= LARGE_PAGE // 2:
        _advise_large_pages(made)
    return made


def _advise_large_pages(t: Tensor) -> None:
    """Ask the system for large pages. This has no effect on systems without them."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return
    usual = mmap.PAGESIZE
    start = -(-t.data_ptr() // usual) * usual
    size = (t.data_ptr() + t.nbytes) // usual * usual - start
    advise = ctypes.CDLL(None).madvise
    advise(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_int(mmap.MADV_HUGEPAGE))
