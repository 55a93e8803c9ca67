"""What can be done faster than its reference, and which way is taken; nothing here is needed."""

from weir.kernels.kernels import VARIABLE, decode, farthest_first, paths, walk

__all__ = ["VARIABLE", "decode", "farthest_first", "paths", "walk"]
