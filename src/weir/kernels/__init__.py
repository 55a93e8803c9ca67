"""What can be done faster than its reference, and which way is taken; nothing here is needed."""

from weir.kernels.kernels import (
    VARIABLE,
    causal,
    decode,
    decode_coded,
    decode_exact,
    distances,
    draws,
    farthest_first,
    linear,
    linear8,
    paths,
    read8,
    resample,
    turned,
    walk,
    write8,
)
from weir.kernels.loops import as_one, dots, in_memory, sums

__all__ = [
    "VARIABLE",
    "as_one",
    "causal",
    "decode",
    "decode_coded",
    "decode_exact",
    "distances",
    "dots",
    "draws",
    "farthest_first",
    "in_memory",
    "linear",
    "linear8",
    "paths",
    "read8",
    "resample",
    "sums",
    "turned",
    "walk",
    "write8",
]
