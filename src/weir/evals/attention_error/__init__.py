"""How far a policy's attention is from exact attention, layer by layer."""

from weir.evals.attention_error.attention_error import (
    MOST_TOKENS,
    LayerError,
    mean_over_layers,
    measure_error,
    set_up,
    size_policies,
)
from weir.evals.attention_error.capture import Captured, capture_each

__all__ = [
    "MOST_TOKENS",
    "Captured",
    "LayerError",
    "capture_each",
    "mean_over_layers",
    "measure_error",
    "set_up",
    "size_policies",
]
