"""Selects the CPU engine's kernels, as `weir.kernels.dispatch` does for those of slabs and pools.

Each function that finds a kernel returns None (`block_function` returns 0) if there is none: numba
is not installed, the processor lacks the instructions, the kernel cannot read the tensors, or
`WEIR_KERNELS` chooses another library or none. Functions that are given tensors also return None
while PyTorch compiles (`is_compiling`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from weir.kernels import Finder, KernelTable, is_compiling

if TYPE_CHECKING:  # importing the file compiles nothing, but needs numba
    from weir.native.kernels.step import StepTable

BlockWeight = tuple[Tensor, Tensor, int, str]
"""A weight in blocks: codes, scales, number of outputs, and type (`native.block_formats`)."""
LinearKernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x, weight, bias) -> products."""
Int8Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x, numbers, scale) -> products."""
BlockKernel = Callable[[Tensor, Tensor, Tensor, int, str], Tensor]
"""(x, codes, scales, outputs, type of the blocks) -> products."""
GatedKernel = Callable[[Tensor, BlockWeight, BlockWeight, BlockWeight, str], Tensor | None]
"""(x, gate, up, down, activation) -> answers. None if there are too few rows."""
RowsKernel = Callable[[Tensor, Tensor, Tensor, int, str], Tensor | None]
"""(numbers of the rows, codes, scales, outputs, type of the blocks) -> rows. None if a row does
not exist.
"""
ReaderKernel = Callable[[np.ndarray, Any, Tensor], tuple[int, np.ndarray, list[object]]]
"""(numbers of the rows, weight in blocks, output) -> a look-up for a step table."""
PackKernel = Callable[[str, np.ndarray, Tensor, Tensor, int], bool]
"""(type of the blocks, data, codes, scales, first panel) -> whether it has packed them."""

_TABLE = KernelTable(
    {
        ("numba", "linear"): ("weir.native.kernels.linear", "linear"),
        ("numba", "linear_int8"): ("weir.native.kernels.linear", "linear_int8"),
        ("numba", "decode_step"): ("weir.native.kernels.step", "StepTable"),
        ("numba", "linear_blocks"): ("weir.native.kernels.linear_blocks", "linear_blocks"),
        ("numba", "block_function"): ("weir.native.kernels.linear_blocks", "block_function"),
        ("numba", "block_rows"): ("weir.native.kernels.block_rows", "block_rows"),
        ("numba", "block_reader"): ("weir.native.kernels.block_rows", "block_reader"),
        ("numba", "pack_blocks"): ("weir.native.kernels.pack_blocks", "pack_blocks"),
        ("numba", "mlp_blocks"): ("weir.native.kernels.mlp_blocks", "mlp_blocks"),
    }
)

paths = _TABLE.paths
"""The library that runs each of these kernels on a device, or `reference`."""
decode_step: Finder[type[StepTable]] = _TABLE.by_device("decode_step")
"""The class of tables that run a whole decode step."""
linear: Finder[LinearKernel] = _TABLE.by_device("linear")
"""For `torch.nn.functional.linear` with few rows."""
linear_int8: Finder[Int8Kernel] = _TABLE.by_device("linear_int8")
"""For products of few rows with a weight of 8 bits."""


def linear_blocks(x: Tensor) -> BlockKernel | None:
    """Return the kernel for products with weights in GGUF's blocks (see
    `weir.native.kernels.linear_blocks`); None if each product dequantizes the weight.

    Args:
        x: the input.
    """
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return None
    if is_compiling() or x.requires_grad:
        return None
    return _TABLE.find("linear_blocks", x.device)


def mlp_blocks(x: Tensor) -> GatedKernel | None:
    """Return the kernel for a whole MLP with weights in blocks; None if each product runs
    separately.
    """
    if linear_blocks(x) is None:
        return None
    return _TABLE.find("mlp_blocks", x.device)


def block_function(kind: str, device: torch.device) -> int:
    """Compile products with weights of a type of blocks.

    Returns the address of their function, by which a `decode_step` table calls it. The address is
    negated if the weights are numbers of 16 bits (F16, BF16), and 0 if this machine has no kernel
    for such products.
    """
    found = _TABLE.find("block_function", device) if device.type == "cpu" else None
    return 0 if found is None else int(found(kind))


def block_rows(which: Tensor, codes: Tensor) -> RowsKernel | None:
    """Return the kernel that dequantizes rows of a weight in blocks, which
    `weir.native.kernels.block_rows` describes. None if PyTorch should do it.

    Args:
        which: the numbers of the rows.
        codes: of the weight.
    """
    if which.device.type != "cpu" or which.dtype != torch.int64 or not codes.is_cpu:
        return None
    return None if is_compiling() else _TABLE.find("block_rows", which.device)


block_reader: Finder[ReaderKernel] = _TABLE.by_device("block_reader")
"""For rows that a `decode_step` table looks up in a weight in blocks."""
pack_blocks: Finder[PackKernel] = _TABLE.by_device("pack_blocks")
"""For `weir.native.block_weights.Blocks.fill`, for the commonest types."""
