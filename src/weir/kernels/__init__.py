"""Optional kernels that are faster than their readable references, and the choice among them.

The docstrings of most kernels' files name the *roofline*: the work that no implementation can
avoid, which limits how fast the kernel can be.
"""

from weir.kernels.dispatch import (
    ALIKE,
    LEAST_LANES,
    VARIABLE,
    Finder,
    KernelTable,
    attend_window,
    causal,
    causal_and_received,
    decode,
    decode_exact,
    decode_int4,
    decode_quantized,
    dequantize,
    distances,
    draw_uniform,
    farthest_first,
    forget_kernels,
    is_compiling,
    note_missing_kernels,
    paths,
    quantize,
    resample,
    rotate_keys,
    walk,
    walk_pairs,
)
from weir.kernels.signatures import (
    Coded,
    QuantizedVectors,
    RotatedDecodeKernel,
    WindowChunk,
    WindowKernel,
)
