"""A transformers `Cache` of fixed size."""

from weir.cache.cache import Positions, Prefill, StreamingCache
from weir.cache.contents import Held

__all__ = [
    "Held",
    "Positions",
    "Prefill",
    "StreamingCache",
]
