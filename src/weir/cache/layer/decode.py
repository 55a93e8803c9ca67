"""Compiled decode step of one layer: one token a row, in buffers of constant shape.

A token of each row goes into the slot that waits for it, and attention reads the whole slab through
a mask that ends at that slot, so one compiled program serves an endless stream.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from weir.cache.layer.layer_state import LayerSpec
from weir.slab import (
    AttendedSlots,
    AttentionParams,
    QuantizedStorage,
    Slab,
    compute_attention,
    merge_groups,
    put_lines,
    slot_lines,
    uses_loops,
)


@dataclass
class DecodeSlots:
    """The slots of a layer, as a decode step of constant shape uses them.

    Attributes:
        keys, values: all exact slots [batch, kv_heads, slots, dim].
        quantized: quantized slots, which come first; None for none.
        a, b: log-weights [batch, kv_heads, slots]; a is None if it equals b everywhere.
        split: both as `split_attention` reads them; None if a equals b.
        queries: the buffer of queries that wait for the fold; None if none do.
        unasked: number of tokens of a tail that share the first place of that buffer
            (`LayerSpec.query_place`); below 0 if queries of older tokens are in front.
        window: how many tokens a query sees; None for all.
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
    def of(cls, slab: Slab, spec: LayerSpec) -> DecodeSlots | None:
        """Make the decode slots of a layer; None if its steps cannot be compiled (`why_not`)."""
        if cls.why_not(spec) is not None:
            return None
        pipe, positions = spec.pipe, spec.positions
        a, window = slab.a if pipe.two_weights else None, positions.window
        queries, unasked = slab.queries, spec.chunk - spec.keeps_queries
        weights = (a, slab.b, slab.split)
        return cls(slab.keys, slab.values, slab.quantized, *weights, queries, unasked, window)

    @staticmethod
    def why_not(spec: LayerSpec) -> str | None:
        """Return why a layer's steps cannot be of constant shape; None if they can."""
        pipe, positions = spec.pipe, spec.positions
        if pipe.slots is None:
            return "its policy has no fixed number of slots"
        if pipe.log_n:
            return "its policy scales queries by the number of tokens"
        if positions.alibi is not None:
            return "its attention has linear biases"
        if positions.rotary is not None and not positions.placed:
            return "its attention is code of its own, and leaves rotations to weir"
        return None

    @property
    def sizes(self) -> Hashable:
        """Key of a compiled graph: shapes, types, which tensors are present, and constants."""
        stored = (
            None if self.quantized is None else (self.quantized.format.name, len(self.quantized))
        )
        constants = stored, self.a is None, self.queries is None, self.unasked, self.window
        return self.keys.shape, self.values.shape, self.keys.dtype, self.keys.device, constants

    def tensors(self) -> list[Tensor]:
        """Return all that a compiled step may read or write."""
        stored = () if self.quantized is None else self.quantized.buffers.values()
        held = self.keys, self.values, *stored, self.a, self.b, *(self.split or ()), self.queries
        return [t for t in held if t is not None]

    def attend(
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
            ends: the slot of each row's token [batch], int64.
            waiting: tokens in each row's tail before it [batch], int64.
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
        result = compute_attention(
            queries, slots, params, by="loops" if uses_loops(queries) else "torch"
        )
        return result.answers.flatten(1, 2)
