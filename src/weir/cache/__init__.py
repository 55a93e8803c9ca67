"""A transformers `Cache` of fixed size."""

from weir.cache.cache import Positions, Prefill, StreamingCache
from weir.cache.contents import Contents
from weir.cache.default import DEFAULT, FILE, policy_beside, policy_for
from weir.cache.forward import Folded, Forward
from weir.cache.generating import generate
from weir.cache.holding import Held, Holding, holding_in
from weir.cache.layers import LayerPlan, pipes_of, plan_layers
from weir.cache.origin import check_origin
from weir.cache.rowcheck import check_numbers, check_row, check_sizes, row_facts
from weir.cache.schema import FARTHEST, Kind, Wrong, at, list_of, optional, record, text, whole
from weir.cache.size import Size, read_bytes, size_of
from weir.cache.state import RowState, check_state, unlike_policies
from weir.cache.window import beyond_window

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
    "Wrong",
    "at",
    "beyond_window",
    "check_numbers",
    "check_origin",
    "check_row",
    "check_sizes",
    "check_state",
    "generate",
    "holding_in",
    "list_of",
    "optional",
    "pipes_of",
    "plan_layers",
    "policy_beside",
    "policy_for",
    "read_bytes",
    "record",
    "row_facts",
    "size_of",
    "text",
    "unlike_policies",
    "whole",
]
