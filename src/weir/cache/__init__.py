"""A transformers `Cache` of fixed size."""

# Imported first, because it imports weir.models, which refuses releases of transformers that lack
# what the other modules need.
from weir.cache.default_policy import (
    DEFAULT,
    FILE,
    check_origin,
    choose_policy,
    depends_on_weights,
    find_model_policy,
    fit_to_model,
)

# isort: split
from weir.cache.cache import Positions, Prefill, StreamingCache
from weir.cache.forward import Folded, Forward
from weir.cache.generating import generate
from weir.cache.layers import LayerPlan, describe_window_excess
from weir.cache.observing import Attention, AttentionCall, ListeningCache
from weir.cache.repetition import Repetition, fill, repetition_scores
from weir.cache.row_state import RowFormat, RowState, check_kind, check_token, located
from weir.cache.size import Size, read_bytes, size_of
from weir.cache.snapshot import Contents, Held, Holding, holding_in

__all__ = [
    "Contents",
    "Folded",
    "Held",
    "Holding",
    "RowFormat",
    "RowState",
    "Size",
    "StreamingCache",
    "generate",
    "read_bytes",
    "size_of",
]
