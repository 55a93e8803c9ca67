"""A transformers `Cache` of fixed size."""

# First: weir.models, which it imports, refuses releases of transformers that lack what others need.
from weir.cache.default_policy import (
    DEFAULT,
    FILE,
    check_origin,
    choose_policy,
    find_model_policy,
    fit_to_model,
)

# isort: split
from weir.cache.cache import Positions, Prefill, StreamingCache
from weir.cache.forward import Folded, Forward
from weir.cache.generating import generate
from weir.cache.layers import LayerPlan, describe_window_excess
from weir.cache.row_state import (
    FARTHEST,
    Kind,
    RowState,
    ValidationError,
    check_row,
    check_state,
    cut_rows,
    integer,
    list_of,
    optional,
    record,
    row_facts,
    text,
    unlike_policies,
)
from weir.cache.size import Size, read_bytes, size_of
from weir.cache.snapshot import Contents, Held, Holding, holding_in

__all__ = [
    "DEFAULT",
    "FARTHEST",
    "FILE",
    "Contents",
    "Folded",
    "Forward",
    "Held",
    "Holding",
    "Kind",
    "LayerPlan",
    "Positions",
    "Prefill",
    "RowState",
    "Size",
    "StreamingCache",
    "ValidationError",
    "check_origin",
    "check_row",
    "check_state",
    "choose_policy",
    "cut_rows",
    "describe_window_excess",
    "find_model_policy",
    "fit_to_model",
    "generate",
    "holding_in",
    "integer",
    "list_of",
    "optional",
    "read_bytes",
    "record",
    "row_facts",
    "size_of",
    "text",
    "unlike_policies",
]
