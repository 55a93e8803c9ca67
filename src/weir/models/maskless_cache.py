"""A cache of transformers for forwards in which weir sets positions and computes attention."""

from __future__ import annotations

from transformers import Cache


class MasklessCache(Cache):
    """A cache that has no layers and needs no mask; subclasses define `update`."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions come from weir."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return sizes for a mask that is never read."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0, for a mask that is never read."""
        return 0
