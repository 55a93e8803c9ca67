"""What stands for the cache in a compiled decode step.

A `Step` holds tensors and constants only: of anything else the compiler would ask at every step
whether it is still the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from weir.cache.layer import Spot
from weir.slab import (
    Form,
    fused_attention,
    fuses,
    lined,
    split_attention,
    two_weight_attention,
)


class Step(Cache):
    """What a compiled forward of one token meets in place of the cache.

    Attributes:
        spots: by layer.
        ends: the slot of the new token, by layer [layers], int64.
        waiting: tokens in the tail before it [1], int64.
        largest: what is written there: the largest absolute key or value of each layer [layers].
        tables: cosines and sines by type of layers and width, as `StreamingCache.rotations` has it.
    """

    def __init__(
        self,
        spots: list[Spot],
        ends: Tensor,
        waiting: Tensor,
        tables: dict[tuple[str | None, int], tuple[Tensor, Tensor] | None],
    ) -> None:
        super().__init__(layers=[])
        self.spots = spots
        self.ends = ends
        self.waiting = waiting
        self.largest = torch.zeros(len(spots), device=ends.device)
        self.tables = tables

    @property
    def sizes(self) -> tuple[torch.Size, ...]:
        """The shapes of the slabs: each has a graph of its own."""
        return tuple(spot.keys.shape for spot in self.spots)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Tensor]:
        """Pass new keys and values on to weir's attention, with the layer they are for."""
        return (self, layer_idx, key_states), value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing: positions come from weir."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Sizes for a mask nobody reads."""
        return query_length, 0

    def rotations(
        self, kind: str | None, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor] | None:
        """As `StreamingCache.rotations`, made before the step began."""
        return self.tables[kind, width]

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, form: Form
    ) -> Tensor:
        """One layer's attention; shapes as in `Layer.attend`, for one token."""
        spot, end = self.spots[layer], self.ends[layer : layer + 1]
        batch, kv_heads, _, dim = keys.shape
        queries = queries.view(batch, kv_heads, -1, 1, dim)
        spot.keys.index_copy_(2, end, keys)
        spot.values.index_copy_(2, end, values)
        if spot.queries is not None:
            spot.queries.index_copy_(2, self.waiting + spot.wanted, lined(queries))
        largest = torch.maximum(keys.abs().amax(), values.abs().amax())
        self.largest[layer : layer + 1].copy_(largest)
        place = torch.arange(spot.b.shape[2], device=end.device)
        seen = place <= end
        if spot.window is not None:
            seen &= place > end - spot.window
        if spot.split is not None and fuses(form):
            mask, numerator, denominator = spot.split
            mask = mask.masked_fill(~seen, -torch.inf)
            out = split_attention(
                queries, spot.keys, spot.values, mask, numerator, denominator, form
            )
            return out.flatten(1, 2)
        below = spot.b.masked_fill(~seen, -torch.inf)
        if spot.a is None and fuses(form):
            bias = below[:, :, None, None]
            out = fused_attention(queries, spot.keys, spot.values, form, bias)
        else:
            above = below if spot.a is None else spot.a.masked_fill(~seen, -torch.inf)
            out = two_weight_attention(queries, spot.keys, spot.values, above, below, form)
        return out.flatten(1, 2)
