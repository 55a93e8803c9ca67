"""Selection of a kernel by device, installed libraries and the environment.

A kernel is chosen by the device of the tensors and by what is installed: numba on the CPU, Triton
on a GPU, and the reference (`weir.pools.balance.halving.walk`, `weir.slab.attention`) everywhere
else. The environment variable `WEIR_KERNELS` overrides this choice: `reference` means no kernel at
all, and `numba` or `triton` means this library on every device. (For tests, Triton runs on the CPU
with `TRITON_INTERPRET=1`.)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

from weir.errors import WeirError, describe_missing
from weir.kernels.signatures import (
    CausalKernel,
    DecodeKernel,
    DequantizeKernel,
    DistanceKernel,
    DrawKernel,
    FarthestKernel,
    PairWalkKernel,
    QuantizedDecodeKernel,
    QuantizeKernel,
    ReceivedKernel,
    ResampleKernel,
    RotatedDecodeKernel,
    RotateKernel,
    WalkKernel,
    WeightedDecodeKernel,
    WindowKernel,
)

LEAST_LANES = 16
"""Smallest number of queries, and smallest size of a value, that the kernels for segments of a
prompt support.
"""
LEAST_WIDE = 32
"""Smallest size of a key or value that the kernels for quantized slots read in vectors."""
ALIKE = 2.0**-19
"""Scores of slots count as equal if they differ by at most this share, 16 times the machine epsilon
of float32.

In a stream that repeats itself, several tokens are equally good, and their scores differ only by
rounding. Rounding must not decide which token stays, because it depends on the batch, the kernel,
the processor, and on whether a step is compiled.
"""


K = TypeVar("K")
Finder = Callable[[torch.device], K | None]
"""Returns the kernel for a device; None for the reference or PyTorch."""
VARIABLE = "WEIR_KERNELS"
_BY_DEVICE = {"cpu": "numba", "cuda": "triton"}
_LIBRARIES = ("numba", "triton")


@dataclass(frozen=True)
class KernelTable:
    """Kernels of each library; the device and the environment determine which one is used.

    Attributes:
        places: by library and kernel, the module and the name of the function.
    """

    places: Mapping[tuple[str, str], tuple[str, str]]

    def by_device(self, name: str) -> Callable[[torch.device], Any]:
        """Make a function that returns the kernel for a device; None for the reference or
        PyTorch.
        """
        return lambda device: self.find(name, device)

    def find(self, name: str, device: torch.device) -> Callable[..., Any] | None:
        """Return the kernel for a device; None for the reference or PyTorch."""
        return self._of(_library(device), name)

    def paths(self, device: torch.device) -> dict[str, str]:
        """Return the library that runs each kernel on a device, or `reference`."""
        library = _library(device)
        names = dict.fromkeys(kernel for _, kernel in self.places)
        return {name: library if self._of(library, name) else "reference" for name in names}

    def _of(self, library: str, name: str) -> Callable[..., Any] | None:
        place = self.places.get((library, name))
        return None if place is None else _kernel(library, *place)


_TABLE = KernelTable(
    {
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
        ("triton", "walk"): ("weir.kernels.gpu.walk", "walk"),
        ("triton", "decode"): ("weir.kernels.gpu.decode", "decode"),
        ("triton", "decode_quantized"): ("weir.kernels.gpu.decode_quantized", "decode_quantized"),
    }
)
"""All kernels of weir except those of the native engine."""


walk: Finder[WalkKernel] = _TABLE.by_device("walk")
"""The kernel for `weir.pools.balance.halving.walk`."""
decode: Finder[WeightedDecodeKernel] = _TABLE.by_device("decode")
"""The kernel for `weir.slab.attention.two_weight_attention` with one query per head."""
decode_quantized: Finder[QuantizedDecodeKernel] = _TABLE.by_device("decode_quantized")
"""The kernel for one query per head over slots of which the first are quantized."""
farthest_first: Finder[FarthestKernel] = _TABLE.by_device("farthest_first")
"""The kernel for `weir.pools.kcenter.farthest_first`."""
draw_uniform: Finder[DrawKernel] = _TABLE.by_device("draw_uniform")
"""The kernel for the random numbers of `weir.pools.counter_rng`."""
distances: Finder[DistanceKernel] = _TABLE.by_device("distances")
"""The kernel for Euclidean `torch.cdist`."""
resample: Finder[ResampleKernel] = _TABLE.by_device("resample")
"""The kernel for `weir.pools.subgen.resample`."""


def walk_pairs(keys: torch.Tensor) -> PairWalkKernel | None:
    """Return the kernel that walks through the pairs of tokens in blocks, and computes their inner
    products itself (see `weir.kernels.cpu.walk`). None to use PyTorch's products and `walk`.
    """
    return _for_floats("walk_pairs", keys)


def decode_exact(device: torch.device, dtype: torch.dtype) -> DecodeKernel | None:
    """Return the kernel for one query per head over exact slots (see `weir.kernels.cpu.decode`);
    None for PyTorch.

    Args:
        device, dtype: device and dtype of the slots.
    """
    kernel = _TABLE.find("decode_exact", device)
    known = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    return kernel if known else None


def decode_int4(queries: torch.Tensor, width: int) -> RotatedDecodeKernel | None:
    """Return the kernel for one query per head over slots of which the first have 4 bits and are
    rotated (see `weir.kernels.cpu.decode`); None if these must be dequantized first.

    Args:
        queries: [..., key_dim].
        width: numbers in a value.
    """
    if queries.device.type != "cpu" or min(queries.shape[-1], width) < LEAST_WIDE:
        return None
    return _TABLE.find("decode_int4", queries.device)


def causal(queries: torch.Tensor, values: torch.Tensor) -> CausalKernel | None:
    """Return the kernel for attention of the newest tokens over all slots (see
    `weir.kernels.cpu.causal`); None for PyTorch.

    Args:
        queries: [batch, kv_heads, group, length, key_dim].
        values: as they are stored in the slab [batch, kv_heads, slots, value_dim].
    """
    return _for_segment("causal", queries, values)


def causal_and_received(queries: torch.Tensor, values: torch.Tensor) -> ReceivedKernel | None:
    """Return a kernel like `causal` that also returns the attention that slots received; None if
    there is none.
    """
    return _for_segment("causal_and_received", queries, values)


def attend_window(queries: torch.Tensor, values: torch.Tensor) -> WindowKernel | None:
    """Return the kernel for attention of a piece of a prompt over a moving window (see
    `weir.kernels.cpu.window`), for float32 and bfloat16; None if there is none. Arguments are those
    of `causal`.
    """
    if values.shape[3] < LEAST_LANES or values.dtype != queries.dtype:
        return None
    return _for_floats("attend_window", queries, torch.float32, torch.bfloat16)


def rotate_keys(keys: torch.Tensor) -> RotateKernel | None:
    """Return the kernel for `weir.slab.positions.Rotary.move` (see `weir.kernels.cpu.rotation`);
    None for PyTorch.
    """
    return _for_floats("rotate_keys", keys)


def dequantize(name: str, out: torch.Tensor) -> DequantizeKernel | None:
    """Return the kernel that dequantizes vectors of a format, int8 or int4, into tensors like `out`
    (see `weir.kernels.cpu.slot_codec`); None for PyTorch.
    """
    return _for_floats(f"dequantize_{name}", out)


def quantize(name: str, x: torch.Tensor) -> QuantizeKernel | None:
    """Return the kernel that quantizes vectors like `x` to a format, int8 or int4; None for
    PyTorch.
    """
    return _for_floats(f"quantize_{name}", x)


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


paths = _TABLE.paths
"""Return the library that runs each of these kernels on a device, or `reference`."""


@lru_cache
def note_missing_kernels(kind: str) -> None:
    """Warn, once for each kind of device, if faster kernels are missing.

    Args:
        kind: a device's type.
    """
    library = _BY_DEVICE.get(kind)
    if (
        VARIABLE in os.environ
        or library is None
        or _TABLE.find("walk", torch.device(kind)) is not None
    ):
        return
    missing = describe_missing("weir runs slower than it could; for speed it", library)
    warnings.warn(missing, stacklevel=2)


def _for_segment(
    name: str, queries: torch.Tensor, values: torch.Tensor
) -> Callable[..., Any] | None:
    """Return a kernel for the queries of a segment of a prompt."""
    if min(queries.shape[3], values.shape[3]) < LEAST_LANES:
        return None
    return _for_floats(name, queries) if values.dtype == queries.dtype else None


def _for_floats(name: str, t: torch.Tensor, *dtypes: torch.dtype) -> Callable[..., Any] | None:
    """Return a kernel for some dtypes (by default float32) on the CPU. None if the tensor needs
    gradients, and while PyTorch compiles or traces.
    """
    if t.device.type != "cpu" or t.dtype not in (dtypes or (torch.float32,)) or t.requires_grad:
        return None
    if is_compiling():
        return None
    return _TABLE.find(name, t.device)


def _library(device: torch.device) -> str:
    """Return the library to use; WeirError if the environment asks for one that is not
    available.
    """
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return _BY_DEVICE.get(device.type, "reference")
    if wanted != "reference" and wanted not in _LIBRARIES:
        raise WeirError(f"{VARIABLE} must be reference, numba or triton, got {wanted!r}")
    if wanted in _LIBRARIES and find_spec(wanted) is None:
        raise WeirError(describe_missing(f"{VARIABLE}={wanted}", wanted))
    return wanted


@lru_cache
def _kernel(library: str, file: str, function: str) -> Callable[..., Any] | None:
    """Return a function of a kernel's file; None if the library or the file cannot be used."""
    if find_spec(library) is None:
        return None
    try:
        module = import_module(file)
    except ImportError:  # installed, but not for this Python, NumPy, PyTorch or processor
        return None
    return getattr(module, function) if getattr(module, "SUPPORTED", True) else None


def forget_kernels() -> None:
    """Forget the libraries and kernels that were found, so that they are searched for again."""
    _kernel.cache_clear()
