"""What can be done faster than its reference, and which way is taken; nothing here is needed."""

from weir.kernels.kernels import (
    VARIABLE,
    decode,
    decode8,
    farthest_first,
    linear,
    linear8,
    paths,
    walk,
)

__all__ = ["VARIABLE", "decode", "decode8", "farthest_first", "linear", "linear8", "paths", "walk"]
