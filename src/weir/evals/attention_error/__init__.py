"""How far a policy's attention is from exact attention, layer by layer."""

from weir.evals.attention_error.attention_error import (
    MOST_TOKENS,
    Row,
    ask,
    mean_rows,
    measure_error,
    set_up,
)

__all__ = [
    "MOST_TOKENS",
    "Row",
    "ask",
    "mean_rows",
    "measure_error",
    "set_up",
]
