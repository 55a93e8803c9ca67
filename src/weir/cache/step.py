"""What stands for the cache in a compiled decode step.

A `Step` holds tensors and constants only: of anything else the compiler would ask at every step
whether it is still the same.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from weir.cache.layer import DecodeSlots
from weir.kernels import materialize
from weir.slab import Form, Rotary, rotation_tables


class Step(Cache):
    """What a compiled forward of one token of each row meets in place of the cache.

    Attributes:
        slots: by layer.
        ends: the slot of each row's token, by layer [layers, batch], int64.
        waiting: tokens in each row's tail before it [batch], int64.
        positions: each row's place in the stream [batch or 1, 1], int64.
        rotaries: the rotary embedding of each type of layers that has one.
        largest: what is written there: the largest absolute key or value of each layer and row
            [layers, batch], float32.
        forms: how each layer attends, by layer; written while the step is traced.
    """

    def __init__(
        self,
        slots: list[DecodeSlots],
        ends: Tensor,
        waiting: Tensor,
        positions: Tensor,
        rotaries: dict[str | None, Rotary],
    ) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.ends = ends
        self.waiting = waiting
        self.positions = positions
        self.rotaries = rotaries
        self.largest = torch.zeros(ends.shape, device=ends.device)

    @property
    def sizes(self) -> tuple[Hashable, ...]:
        """What each layer holds, of which shapes and types: each has a graph of its own."""
        return tuple(its.sizes for its in self.slots)

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
        """Cosines and sines at the rows' places; see `models.hooks.Attending`."""
        made = rotation_tables(self.rotaries, kind, self.positions, width)
        # Once: the compiler would work them out anew for each head of each layer.
        return None if made is None else (materialize(made[0]), materialize(made[1]))

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, form: Form
    ) -> Tensor:
        """One layer's attention, for one token of each row; see `models.hooks.Attending`."""
        rows = self.ends[layer], self.waiting, self.largest[layer]
        return self.slots[layer].attend(queries, keys, values, form, *rows)
