"""The quantized slots of a slab: their keys, values and masters, written and read.

Knows how numbers are written (`quantized`), and nothing about pools, models or attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from weir import kernels
from weir.slab.quantized import (
    Code,
    Format,
    are_levels,
    dequantize,
    dequantize_into,
    quantize_into,
    whole_bytes,
)

CODED = "coded."
"""What the names of a slab's buffers of quantized slots begin with."""
KEYS, VALUES, MASTERS = "keys", "values", "masters"


def coded_in(buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a slab's buffers that are of quantized slots, by the names that `Coded` has."""
    return {n.removeprefix(CODED): t for n, t in buffers.items() if n.startswith(CODED)}


class Coded:
    """Buffers of quantized slots, a view of them or a copy.

    Of each of `keys`, `values` and `masters` there are the numbers as they are stored and the
    peaks. Keys are what attention reads. Where keys move, masters are the keys as they were said:
    they are quantized once, and what attention reads is made from them at each fold and quantized
    for itself, so that a key is off by two roundings however often it has moved.

    Attributes:
        format: how they are written.
        buffers: by name [batch, kv_heads, slots, ...]: `keys`, `keys_peaks`, `values`,
            `values_peaks`, and where keys move `masters`, `masters_peaks`.
        dtype: of what is read.
    """

    def __init__(self, form: Format, buffers: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.format = form
        self.buffers = buffers
        self.dtype = dtype

    @classmethod
    def of(cls, form: Format | None, named: dict[str, Tensor], dtype: torch.dtype) -> Coded | None:
        """Those among a slab's buffers; None where there are none."""
        found = coded_in(named)
        return cls(form, found, dtype) if form is not None and found else None

    def __len__(self) -> int:
        return self.buffers[KEYS].shape[2]

    def tensors(self) -> dict[str, Tensor]:
        """The buffers, by the names that a slab has for them."""
        return {CODED + name: t for name, t in self.buffers.items()}

    def keys(self, start: int, stop: int, behind: Tensor | None = None) -> Tensor:
        """As attention reads them [batch, kv_heads, stop - start, key_dim], in new memory.

        Args:
            start, stop: which slots.
            behind: exact keys that are to lie behind them.
        """
        return self._read(KEYS, start, stop, behind)

    def values(self, start: int, stop: int, behind: Tensor | None = None) -> Tensor:
        """[batch, kv_heads, stop - start, value_dim], as `keys`."""
        return self._read(VALUES, start, stop, behind)

    def masters(self, start: int, stop: int) -> Tensor:
        """Keys as they were said, or as attention reads them where they never move."""
        return self._read(MASTERS if MASTERS in self.buffers else KEYS, start, stop)

    def write(self, start: int, keys: Tensor, values: Tensor, *, front: bool) -> None:
        """Quantize keys and values into the slots from `start` on; the front's go to masters."""
        self._write(MASTERS if front and MASTERS in self.buffers else KEYS, start, keys)
        self._write(VALUES, start, values)

    def put(self, start: int, other: Coded, *, front: bool) -> None:
        """Take over other slots of the same format as they are written; the front's keys go to
        masters.
        """
        keys = MASTERS if front and MASTERS in self.buffers else KEYS
        for mine, theirs in ((keys, KEYS), (VALUES, VALUES)):
            for kind in ("", "_peaks"):
                t = other.buffers[theirs + kind]
                self.buffers[mine + kind][:, :, start : start + len(other)] = t

    def part(self, start: int, stop: int, *, said: bool = False) -> Coded:
        """Slots `start` to `stop`, as a view without masters; `said`: with these for keys."""
        names = {name: name for name in (KEYS, f"{KEYS}_peaks", VALUES, f"{VALUES}_peaks")}
        if said and MASTERS in self.buffers:
            names |= {KEYS: MASTERS, f"{KEYS}_peaks": f"{MASTERS}_peaks"}
        cut = {name: self.buffers[whence][:, :, start:stop] for name, whence in names.items()}
        return Coded(self.format, cut, self.dtype)

    def join(self, other: Coded) -> Coded:
        """These slots and then others of the same format, both without masters."""
        theirs = other.buffers
        joined = {name: torch.cat([t, theirs[name]], dim=2) for name, t in self.buffers.items()}
        return Coded(self.format, joined, self.dtype)

    def map(self, change: Callable[[Tensor], Tensor]) -> Coded:
        """The same kind of slots, each buffer changed."""
        return Coded(self.format, {n: change(t) for n, t in self.buffers.items()}, self.dtype)

    def write_keys(self, start: int, keys: Tensor) -> None:
        """Quantize what attention is to read in place of the keys of slots from `start` on."""
        self._write(KEYS, start, keys)

    @property
    def stored(self) -> tuple[tuple[Tensor, Tensor, int], tuple[Tensor, Tensor, int]]:
        """Of keys and of values the numbers as they are stored [batch, kv_heads, slots, stored],
        the peaks [batch, kv_heads, slots, groups], and how many steps make a peak.
        """
        keys, values = (
            (self.buffers[n], self.buffers[f"{n}_peaks"], self._code(n).levels)
            for n in (KEYS, VALUES)
        )
        return keys, values

    def bytes_of(
        self, start: int, stop: int
    ) -> tuple[kernels.QuantizedVectors, kernels.QuantizedVectors] | None:
        """`stored` of some slots, where keys and values are whole numbers of 8 bits with one peak
        each; None where they are not.
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
