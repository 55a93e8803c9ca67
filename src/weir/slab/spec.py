"""What a layer's buffers will be, before there is one: names, shapes, types, bytes.

Everything that must know sizes ahead asks here: a cache before it allocates, `weir size` before a
model is loaded, a session file before a tensor of it is read. Knows nothing about policies or
models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from weir.slab.quantization import PEAK, Format
from weir.slab.quantized_slots import CODED, KEYS, MASTERS, VALUES

STATE = "state."
"""What the names of tensors that pools remember begin with."""
_BOTH = ("", "_peaks")


@dataclass(frozen=True)
class Heads:
    """The sizes of one layer's attention.

    Attributes:
        kv_heads: heads of keys and values.
        group: query heads to each of them.
        key_dim, value_dim: numbers of a key and of a value.
        dtype: of keys and values.
    """

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class SlabSpec:
    """The buffers of one layer; see `Slab` for what each is.

    Attributes:
        heads: the sizes of its attention.
        slots: slots of a row, quantized ones among them.
        masters: slots of the front whose keys are kept as they were said; 0 where none are.
        mass: whether the attention received is kept.
        two_weights: whether a and b are, as attention reads them.
        frames: whether the positions attention pretends are.
        spans: whether where words and images begin on three axes is.
        queries: how many queries wait in the slab.
        state: what pools remember, by name: the shape behind [batch, kv_heads], and the dtype.
        format: how quantized slots are written; None where there are none.
        coded: how many there are.
        coded_masters: how many of them are of the front, and their keys kept as they were said.
    """

    heads: Heads
    slots: int
    masters: int = 0
    mass: bool = False
    two_weights: bool = False
    frames: bool = False
    spans: bool = False
    queries: int = 0
    state: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    format: Format | None = None
    quantized: int = 0
    quantized_masters: int = 0

    def tensors(self, batch: int = 1) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Every buffer by name, as `Slab.tensors` names them: its shape and dtype."""
        heads, slots = self.heads, (self.slots,)
        exact = self.slots - self.quantized
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "keys": ((exact, heads.key_dim), heads.dtype),
            "values": ((exact, heads.value_dim), heads.dtype),
            "a": (slots, torch.float32),
            "b": (slots, torch.float32),
            "position": (slots, torch.int64),
        }
        if self.mass:
            found["mass"] = (slots, torch.float32)
        if self.masters:
            found["masters"] = ((self.masters, heads.key_dim), heads.dtype)
        if self.two_weights:
            found |= dict.fromkeys(("mask", "numerator", "denominator"), (slots, torch.float32))
        if self.frames:
            found["frame"] = (slots, torch.int64)
        if self.spans:
            found["span"] = ((*slots, 2), torch.int64)
        if self.queries:
            found["queries"] = ((self.queries, heads.group * heads.key_dim), heads.dtype)
        found |= self._quantized()
        found |= {STATE + name: size for name, size in self.state.items()}
        rows = (batch, heads.kv_heads)
        return {name: ((*rows, *shape), dtype) for name, (shape, dtype) in found.items()}

    def _quantized(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """The buffers of quantized slots (`Coded`)."""
        if self.format is None:
            return {}
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, slots, dim, code in (
            (KEYS, self.quantized, self.heads.key_dim, self.format.keys),
            (VALUES, self.quantized, self.heads.value_dim, self.format.values),
            (MASTERS, self.quantized_masters, self.heads.key_dim, self.format.keys),
        ):
            if slots:
                found[CODED + name] = ((slots, code.stored(dim)), code.dtype)
                found[f"{CODED}{name}_peaks"] = ((slots, code.peaks(dim)), PEAK)
        return found

    def nbytes(self, batch: int = 1) -> int:
        """Bytes of all buffers of so many rows."""
        return sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors(batch).values()
        )

    def step_bytes(self, batch: int = 1) -> int:
        """Bytes of keys and values that a decode step reads where every slot is in use."""
        read = ("keys", "values", *(f"{CODED}{n}{p}" for n in (KEYS, VALUES) for p in _BOTH))
        return sum(
            math.prod(shape) * dtype.itemsize
            for name, (shape, dtype) in self.tensors(batch).items()
            if name in read
        )
