"""Describes one token of each row, in the form that engines for whole decode steps read and write.

In a step, one token of each row is stored in the next free slot of its tail, and attention reads
the whole slab through a mask that ends at that slot. All buffers keep their shapes and their memory
between two folds, and most of them longer. So a program that was compiled for one step can run all
following steps of an endless stream.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from weir.slab.attention import AttentionParams
from weir.slab.positions import Rotary
from weir.slab.selection import AttendedSlots, compute_attention
from weir.slab.slab import Slab, merge_groups, put_lines, slot_lines
from weir.slab.slots import QuantizedStorage


@dataclass
class DecodeSlots:
    """The slots of a layer, as a decode step of constant shape uses them.

    Attributes:
        keys, values: all exact slots [batch, kv_heads, slots, dim].
        quantized: quantized slots, which come first; None for none.
        a, b: log-weights [batch, kv_heads, slots]; a is None if it equals b everywhere.
        split: a and b in the form that `split_attention` reads; None if a equals b.
        queries: the buffer of the queries that the next fold reads; None if it reads none.
        unasked: number of tokens at the start of a tail whose queries the fold does not read. All
            these queries are written to the first place of `queries`, each over the one before.
            Negative if `queries` begins with queries of tokens before the tail.
        window: how many of the newest slots a query sees; None for all.
    """

    keys: Tensor
    values: Tensor
    quantized: QuantizedStorage | None
    a: Tensor | None
    b: Tensor
    split: tuple[Tensor, Tensor, Tensor] | None
    queries: Tensor | None
    unasked: int
    window: int | None

    @classmethod
    def of(cls, slab: Slab, *, two_weights: bool, unasked: int, window: int | None) -> DecodeSlots:
        """Make it from a slab; for the other arguments, see the attributes."""
        a = slab.a if two_weights else None
        held = slab.keys, slab.values, slab.quantized, a, slab.b, slab.split, slab.queries
        return cls(*held, unasked, window)

    @property
    def sizes(self) -> Hashable:
        """Return everything that a program of a step depends on: shapes, types, which tensors are
        present, and constants.
        """
        stored = (
            None if self.quantized is None else (self.quantized.format.name, len(self.quantized))
        )
        constants = stored, self.a is None, self.queries is None, self.unasked, self.window
        return self.keys.shape, self.values.shape, self.keys.dtype, self.keys.device, constants

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a step may read or write."""
        stored = () if self.quantized is None else self.quantized.buffers.values()
        held = self.keys, self.values, *stored, self.a, self.b, *(self.split or ()), self.queries
        return [t for t in held if t is not None]

    def decode(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        params: AttentionParams,
        ends: Tensor,
        waiting: Tensor,
        largest: Tensor,
    ) -> Tensor:
        """Store one token of each row and answer its queries [batch, heads, 1, key_dim].

        Args:
            keys, values: [batch, kv_heads, 1, dim].
            ends: the slot in which each row's token is stored [batch], int64.
            waiting: number of tokens in each row's tail before this token [batch], int64.
            largest: output; the largest absolute key or value of each row [batch], float32.
        """
        largest.copy_(torch.maximum(keys.abs().amax((1, 2, 3)), values.abs().amax((1, 2, 3))))
        batch, kv_heads, _, dim = keys.shape
        queries = queries.view(batch, kv_heads, -1, 1, dim)
        first = 0 if self.quantized is None else len(self.quantized)
        lines = slot_lines(ends - first, kv_heads, self.keys.shape[2])
        put_lines(self.keys, keys, lines)
        put_lines(self.values, values, lines)
        if self.queries is not None:
            place = (waiting - self.unasked).clamp_min(0)
            asked = slot_lines(place, kv_heads, self.queries.shape[2])
            put_lines(self.queries, merge_groups(queries), asked)
        slot = torch.arange(self.b.shape[2], device=ends.device)
        seen = slot <= ends[:, None]
        if self.window is not None:
            seen &= slot > ends[:, None] - self.window
        unseen = ~seen[:, None]
        below = self.b.masked_fill(unseen, -torch.inf)
        above = below if self.a is None else self.a.masked_fill(unseen, -torch.inf)
        split = self.split
        if split is not None:
            split = split[0].masked_fill(unseen, -torch.inf), *split[1:]
        held = self.keys, self.values, self.quantized
        slots = AttendedSlots(*held, above, below, split, 0, self.b.shape[2])
        return compute_attention(queries, slots, params, by="torch").answers.flatten(1, 2)


@dataclass(frozen=True, eq=False)
class HeldPart:
    """A part of a layer, in the form that a step reads. A layer whose KV heads have different
    pipes has several parts.

    Attributes:
        slots: the slots of its KV heads.
        params: the parameters of its attention.
        rotary: how queries and keys are rotated; None if they are not.
        heads: its KV heads among those of the layer; None for all.
    """

    slots: DecodeSlots
    params: AttentionParams
    rotary: Rotary | None
    heads: tuple[int, ...] | None


@dataclass(eq=False)
class StepSlots:
    """The slots that all steps of a cache use, and the data that an engine keeps with them.

    Attributes:
        reason: why steps over these slots cannot have a constant shape; None if they can.
        version: the version of the layers' states from which `slabs` and `spans` were read. When
            the states have another version, both are read again.
        slabs: the slab of each part of a layer. They are replaced after a session is restored or
            rows are added.
        spans: for each part, the first slot that is read, and each row's first slot of the tail
            [parts, 1 + batch], int64.
        program: the program that the engine has made for these slots; None if there is none.
        refused: the state for which the engine last failed to make a program, and the reason; None
            if it has not tried to make one, or if it made one the last time.
        asker: the model whose logits are wanted; None while only hidden states are wanted.
    """

    reason: str | None
    version: int = -1
    slabs: list[Slab] = field(default_factory=list)
    spans: np.ndarray = field(default_factory=lambda: np.zeros((0, 1), np.int64))
    program: object = None
    refused: tuple[object, str] | None = None
    asker: weakref.ref[nn.Module] | None = None


class Step:
    """One token of each row, over the slots of all layers.

    Attributes:
        slots: the data that all steps of this cache share.
        spans: for each part of a layer, the first slot that is read, and the slot of each row's
            token [parts, 1 + batch], int64.
        waiting: number of tokens in each row's tail before this token [batch], int64.
        places: the position of each row's token in its stream [batch], int64.
        busy: the rows that have a token. The other rows, if any, only have padding.
        largest: output, float32; the largest absolute key or value. There is one number for each
            part of a layer and each row [parts, batch], or one for each of their heads [parts,
            batch, heads]. None until the step has taken effect in the slots.
        top: output; the largest of `largest`, if the engine has found it.

    Args:
        slots: see the attribute.
        waiting, places, busy: see the attributes.
        hold: function that returns the parts of each layer.
    """

    largest: Tensor | None = None
    top: float | None = None

    def __init__(
        self,
        slots: StepSlots,
        waiting: Sequence[int],
        places: np.ndarray,
        busy: list[int],
        hold: Callable[[], list[list[HeldPart]]],
    ) -> None:
        self.slots = slots
        self.spans, self.waiting = slots.spans.copy(), np.array(waiting)
        self.spans[:, 1:] += self.waiting
        self.places, self.busy = places, busy
        self._hold = hold

    def held(self) -> list[list[HeldPart]]:
        """Return the parts of each layer."""
        return self._hold()
