"""Names, shapes, dtypes and bytes of a layer's buffers, before they are allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from weir.slab.quantization import PEAK, Format
from weir.slab.slots import CODED, KEYS, MASTERS, VALUES

STATE = "state."
"""Prefix of the names of pool state tensors."""
_BOTH = ("", "_peaks")


@dataclass(frozen=True)
class Heads:
    """The sizes of one layer's attention.

    Attributes:
        kv_heads: heads of keys and values.
        group: query heads for each KV head.
        key_dim, value_dim: the length of a key, and of a value.
        dtype: of keys and values.
    """

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values of this layer in transformers' `DynamicCache`."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class SlabSpec:
    """The buffers of one layer; see `Slab` for what each is.

    Attributes:
        heads: the sizes of the layer's attention.
        slots: slots of a row, including quantized ones.
        masters: number of exact slots in the front whose original keys are kept; 0 for none.
        mass: whether to keep received attention.
        two_weights: whether to also keep the log-weights a and b in the form that
            `split_attention` reads.
        frames: whether to keep positions in the rolling frame.
        spans: whether to keep the spans of tokens on three axes.
        queries: number of tokens whose queries the slab stores for the next fold.
        state: pool state by name: the shape after [batch, kv_heads], and the dtype.
        format: the format of quantized slots; None if there are none.
        quantized: number of quantized slots.
        quantized_masters: number of quantized slots in the front whose original keys are kept.
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
        """Return shape and dtype of every buffer, by the names of `Slab.tensors`."""
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
        """Return the buffers of quantized slots (`QuantizedStorage`)."""
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
        """Return the bytes of all buffers of `batch` rows."""
        return sum(
            math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors(batch).values()
        )

    def step_bytes(self) -> int:
        """Return the bytes of keys and values that a step of one row reads if every slot is in
        use.
        """
        read = ("keys", "values", *(f"{CODED}{n}{p}" for n in (KEYS, VALUES) for p in _BOTH))
        return sum(
            math.prod(shape) * dtype.itemsize
            for name, (shape, dtype) in self.tensors().items()
            if name in read
        )
