"""A transformers `Cache` of fixed size."""

from weir.cache.cache import Positions, Prefill, StreamingCache
from weir.cache.contents import Contents
from weir.cache.forward import Folded, Forward
from weir.cache.layers import LayerPlan, pipes_of, plan_layers
from weir.cache.memory import free_memory
from weir.cache.size import Size, read_bytes, size_of
from weir.cache.state import RowState

__all__ = [
    "Contents",
    "Folded",
    "Forward",
    "LayerPlan",
    "Positions",
    "Prefill",
    "RowState",
    "Size",
    "StreamingCache",
    "free_memory",
    "pipes_of",
    "plan_layers",
    "read_bytes",
    "size_of",
]
