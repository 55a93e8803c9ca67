"""Selection of a kernel by device, installed libraries and the environment.

A kernel is chosen by the device of the tensors and by what is installed: numba on the CPU, Triton
on a GPU, and the reference (`weir.pools.balance.halving.walk`, `weir.slab.attention`) everywhere
else. The environment variable `WEIR_KERNELS` overrides that: `reference` for no kernel at all,
`numba` or `triton` for one of them wherever it runs (Triton on the CPU with `TRITON_INTERPRET=1`,
to be tested).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from weir.errors import WeirError, describe_missing

LEAST_LANES = 16
"""Queries, and numbers of a value, that a kernel for segments of a prompt takes at least."""
LEAST_WIDE = 32
"""Numbers of a head from which on vectors of a processor fit into it."""
ALIKE = 2.0**-19
"""Numbers by which slots are chosen count as equal if they differ by no more than this share of
them, 16 roundings of float32.

In a stream that repeats itself several tokens are equally good, and their numbers differ by
rounding only. Rounding depends on whether a step is compiled, on the batch, the kernel and the
processor, and must not decide which token stays.
"""


class WindowChunk(NamedTuple):
    """Queries of a piece of a prompt between two folds, and what they see.

    Attributes:
        first, queries: the first query in the piece, and how many there are.
        front: slots of the front that are in use.
        start, boundary: the first token that is seen, and the first that is seen exact, among those
            that are handed over.
        own: the token of the first query.
    """

    first: int
    queries: int
    front: int
    start: int
    boundary: int
    own: int


BlockWeight = tuple[torch.Tensor, torch.Tensor, int, str]
"""A weight in blocks: codes, scales, how many outputs, and its type (`kernels.block_formats`)."""
QuantizedVectors = tuple[torch.Tensor, torch.Tensor, int]
"""Quantized vectors: numbers as they are stored, their peaks, and how many steps make a peak."""
VARIABLE = "WEIR_KERNELS"
_BY_DEVICE = {"cpu": "numba", "cuda": "triton"}
_LIBRARIES = ("numba", "triton")
_KERNELS = {
    ("numba", "walk"): ("weir.kernels.cpu.walk", "walk"),
    ("numba", "walk_pairs"): ("weir.kernels.cpu.walk", "walk_pairs"),
    ("numba", "farthest_first"): ("weir.kernels.cpu.farthest_first", "farthest_first"),
    ("numba", "draw_uniform"): ("weir.kernels.cpu.counter_rng", "draw_uniform"),
    ("numba", "decode_exact"): ("weir.kernels.cpu.decode", "decode_exact"),
    ("numba", "decode_quantized"): ("weir.kernels.cpu.decode_quantized", "decode_quantized"),
    ("numba", "decode_int4"): ("weir.kernels.cpu.decode", "decode_int4"),
    ("numba", "distances"): ("weir.kernels.cpu.distances", "distances"),
    ("numba", "resample"): ("weir.kernels.cpu.resample", "resample"),
    ("numba", "causal"): ("weir.kernels.cpu.causal", "causal"),
    ("numba", "attend_window"): ("weir.kernels.cpu.window", "attend_window"),
    ("numba", "causal_and_received"): ("weir.kernels.cpu.causal", "causal_and_received"),
    ("numba", "rotate_keys"): ("weir.kernels.cpu.rotation", "rotate_keys"),
    ("numba", "dequantize_int8"): ("weir.kernels.cpu.slot_codec", "dequantize_int8"),
    ("numba", "quantize_int8"): ("weir.kernels.cpu.slot_codec", "quantize_int8"),
    ("numba", "dequantize_int4"): ("weir.kernels.cpu.slot_codec", "dequantize_int4"),
    ("numba", "quantize_int4"): ("weir.kernels.cpu.slot_codec", "quantize_int4"),
    ("numba", "linear"): ("weir.kernels.cpu.linear", "linear"),
    ("numba", "linear_int8"): ("weir.kernels.cpu.linear", "linear_int8"),
    ("numba", "decode_step"): ("weir.kernels.cpu.step", "StepTable"),
    ("numba", "linear_blocks"): ("weir.kernels.cpu.linear_blocks", "linear_blocks"),
    ("numba", "block_function"): ("weir.kernels.cpu.linear_blocks", "block_function"),
    ("numba", "block_rows"): ("weir.kernels.cpu.block_rows", "block_rows"),
    ("numba", "pack_blocks"): ("weir.kernels.cpu.pack_blocks", "pack_blocks"),
    ("numba", "mlp_blocks"): ("weir.kernels.cpu.mlp_blocks", "mlp_blocks"),
    ("triton", "walk"): ("weir.kernels.gpu.walk", "walk"),
    ("triton", "decode"): ("weir.kernels.gpu.decode", "decode"),
    ("triton", "decode_quantized"): ("weir.kernels.gpu.decode_quantized", "decode_quantized"),
}
"""The module and the function of each kernel of each library."""


def _by_device(name: str) -> Callable[[torch.device], Callable[..., Any] | None]:
    """Make a function that returns the kernel for a device; None for the reference or PyTorch."""
    return lambda device: _kernel(_library(device), name)


walk = _by_device("walk")
"""For `weir.pools.balance.halving.walk`."""
decode = _by_device("decode")
"""For `weir.slab.attention.two_weight_attention` with one query a head."""
decode_quantized = _by_device("decode_quantized")
"""For one query a head over slots of which the first are quantized."""
decode_step = _by_device("decode_step")
"""The class of tables that run a whole decode step."""
farthest_first = _by_device("farthest_first")
"""For `weir.pools.kcenter.farthest_first`."""
draw_uniform = _by_device("draw_uniform")
"""For random numbers by name, as in `weir.pools.counter_rng`."""
distances = _by_device("distances")
"""For Euclidean `torch.cdist`."""
resample = _by_device("resample")
"""For `weir.pools.subgen.resample`."""
linear = _by_device("linear")
"""For `torch.nn.functional.linear` with few rows."""
linear_int8 = _by_device("linear_int8")
"""For products of few rows with a weight of 8 bits."""


def walk_pairs(keys: torch.Tensor) -> Callable[..., Any] | None:
    """The kernel that walks through pairs of blocks and makes their inner products on the way (see
    `weir.kernels.cpu.walk`); None for PyTorch's products and `walk`.
    """
    return _for_floats("walk_pairs", keys)


def decode_exact(device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
    """The kernel for one query a head over exact slots (see `weir.kernels.cpu.decode`); None for
    PyTorch.

    Args:
        device, dtype: of the slots.
    """
    kernel = _kernel(_library(device), "decode_exact")
    known = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    return kernel if known else None


def decode_int4(queries: torch.Tensor, width: int) -> Callable[..., Any] | None:
    """The kernel for one query a head over slots of which the first have 4 bits, rotated (see
    `weir.kernels.cpu.decode`); None where they are dequantized before they are read.

    Args:
        queries: [..., key_dim].
        width: numbers of a value.
    """
    if queries.device.type != "cpu" or min(queries.shape[-1], width) < LEAST_WIDE:
        return None
    return _kernel(_library(queries.device), "decode_int4")


def causal(queries: torch.Tensor, values: torch.Tensor) -> Callable[..., Any] | None:
    """The kernel for attention of the newest tokens over all slots (see `weir.kernels.cpu.causal`);
    None for PyTorch.

    Args:
        queries: [batch, kv_heads, group, length, key_dim].
        values: as they lie in the slab [batch, kv_heads, slots, value_dim].
    """
    return _for_segment("causal", queries, values)


def causal_and_received(queries: torch.Tensor, values: torch.Tensor) -> Callable[..., Any] | None:
    """As `causal`, a kernel that also returns the attention that slots received; None for none."""
    return _for_segment("causal_and_received", queries, values)


def attend_window(queries: torch.Tensor, values: torch.Tensor) -> Callable[..., Any] | None:
    """The kernel for attention of a piece of a prompt over a window that moves on meanwhile (see
    `weir.kernels.cpu.window`), also for bfloat16; None for none. Arguments as for `causal`.
    """
    if values.shape[3] < LEAST_LANES or values.dtype != queries.dtype:
        return None
    return _for_floats("attend_window", queries, torch.float32, torch.bfloat16)


def rotate_keys(keys: torch.Tensor) -> Callable[..., Any] | None:
    """The kernel for `weir.slab.positions.Rotary.move` (see `weir.kernels.cpu.rotation`); None for
    PyTorch.
    """
    return _for_floats("rotate_keys", keys)


def dequantize(name: str, out: torch.Tensor) -> Callable[..., Any] | None:
    """The kernel that reads vectors of a format, int8 or int4, into such a tensor (see
    `weir.kernels.cpu.slot_codec`); None for PyTorch.
    """
    return _for_floats(f"dequantize_{name}", out)


def quantize(name: str, x: torch.Tensor) -> Callable[..., Any] | None:
    """The kernel that quantizes such vectors to a format, int8 or int4; None for PyTorch."""
    return _for_floats(f"quantize_{name}", x)


def linear_blocks(x: torch.Tensor) -> Callable[..., Any] | None:
    """The kernel for products with weights in GGUF's blocks (see
    `weir.kernels.cpu.linear_blocks`); None where the weight is written out for each.

    Args:
        x: what is multiplied.
    """
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    if x.requires_grad or is_compiling():
        return None
    return _kernel(_library(x.device), "linear_blocks")


def mlp_blocks(x: torch.Tensor) -> Callable[..., Any] | None:
    """The kernel for a whole MLP with such weights; None where each product is made by itself."""
    if linear_blocks(x) is None:
        return None
    return _kernel(_library(x.device), "mlp_blocks")


def block_function(kind: str, device: torch.device) -> int:
    """Compile products with weights of a type of blocks.

    Returns the address by which a `decode_step` table calls them; 0 if there are none here.
    """
    found = _kernel(_library(device), "block_function") if device.type == "cpu" else None
    return 0 if found is None else int(found(kind))


def block_rows(which: torch.Tensor, codes: torch.Tensor) -> Callable[..., Any] | None:
    """The kernel that writes out rows of a weight in blocks (see `weir.kernels.cpu.block_rows`);
    None for PyTorch.

    Args:
        which: the numbers of the rows.
        codes: of the weight.
    """
    if which.device.type != "cpu" or which.dtype != torch.int64 or not codes.is_cpu:
        return None
    return None if is_compiling() else _kernel(_library(which.device), "block_rows")


pack_blocks = _by_device("pack_blocks")
"""For `weir.models.block_weights.Blocks.fill`, for the commonest types."""


def is_compiling() -> bool:
    """Whether PyTorch compiles, traces, intercepts or transforms (`torch.vmap`) the operations.

    A kernel reads memory by address, which PyTorch cannot record.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
    )


def paths(device: torch.device) -> dict[str, str]:
    """The library that runs each kernel on a device, or `reference`."""
    library = _library(device)
    names = dict.fromkeys(kernel for _, kernel in _KERNELS)
    return {name: library if _kernel(library, name) else "reference" for name in names}


@lru_cache
def note_missing_kernels(kind: str) -> None:
    """Warn, once for a kind of device, where kernels are missing that would be faster.

    Args:
        kind: a device's type.
    """
    library = _BY_DEVICE.get(kind)
    if VARIABLE in os.environ or library is None or _kernel(library, "walk") is not None:
        return
    missing = describe_missing("weir runs slower than it could; for speed it", library)
    warnings.warn(missing, stacklevel=2)


def _for_segment(
    name: str, queries: torch.Tensor, values: torch.Tensor
) -> Callable[..., Any] | None:
    """A kernel for the queries of a segment of a prompt."""
    if min(queries.shape[3], values.shape[3]) < LEAST_LANES:
        return None
    return _for_floats(name, queries) if values.dtype == queries.dtype else None


def _for_floats(name: str, t: torch.Tensor, *dtypes: torch.dtype) -> Callable[..., Any] | None:
    """A kernel for some dtypes (none for float32) on the CPU; None for gradients and while PyTorch
    compiles or traces.
    """
    if t.device.type != "cpu" or t.dtype not in (dtypes or (torch.float32,)) or t.requires_grad:
        return None
    if is_compiling():
        return None
    return _kernel(_library(t.device), name)


def _library(device: torch.device) -> str:
    """The library to take; WeirError if the environment asks for one that there is not."""
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return _BY_DEVICE.get(device.type, "reference")
    if wanted != "reference" and wanted not in _LIBRARIES:
        raise WeirError(f"{VARIABLE} is reference, numba or triton, not {wanted!r}")
    if wanted in _LIBRARIES and find_spec(wanted) is None:
        raise WeirError(describe_missing(f"{VARIABLE}={wanted}", wanted))
    return wanted


@lru_cache
def _kernel(library: str, name: str) -> Callable[..., Any] | None:
    if (library, name) not in _KERNELS or find_spec(library) is None:
        return None
    file, function = _KERNELS[library, name]
    try:
        module = import_module(file)
    except ImportError:  # installed, but not for this Python, NumPy, PyTorch or processor
        return None
    return getattr(module, function) if getattr(module, "SUPPORTED", True) else None
