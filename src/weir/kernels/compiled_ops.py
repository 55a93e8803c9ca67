"""Operations of CPU decode steps, written so that PyTorch's compiler makes loops of them.

A step reads much and computes little, and a library's function that is made for many queries or
rows does so at a fraction of the pace of memory. What stands here is a multiplication and a sum for
each of a few rows: the compiler makes one loop over what they share, at the pace of memory, in one
program with all that comes before and after. Outside of what is being compiled it is right, and
slow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

APART = 2**18
"""Numbers from which on lines are read at two places at once."""
CACHE_LINE = 64
"""Bytes that come from memory at once."""
SUMS = 256 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 64
"""Sums that fit into the registers of a processor: half of 32 of 16 numbers, or of 16 of 8."""


def register_kernel(
    name: str, signature: str, function: Callable[..., Tensor], like: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Register a kernel of the CPU as an operator that compiled programs call.

    Args:
        name: the operator's.
        signature: its arguments and what it returns, as `torch.library.define` takes them.
        function: the kernel.
        like: takes the same and returns what the kernel returns, but for its numbers.
    """
    # Not `torch.library.custom_op`: its checks take as long as a small product, in every call.
    torch.library.define(f"weir::{name}", signature)
    torch.library.impl(f"weir::{name}", "CPU", function)
    torch.library.register_fake(f"weir::{name}", like)
    made: Callable[..., Tensor] = getattr(torch.ops.weir, name).default
    return made


def materialize(t: Tensor) -> Tensor:
    """The tensor, contiguous, computed once; what it is made of would be computed anew by each
    loop that reads it, for each number that it makes.
    """
    t = t.contiguous()
    return torch.as_strided(t, t.shape, t.stride())  # with these strides it has to be in memory


def dot_products(rows: Tensor, lines: Tensor) -> Tensor:
    """The product of each row with each line.

    Args:
        rows: a few [..., rows, dim], float32.
        lines: many [..., lines, dim], of any type that becomes float32.

    Returns:
        [..., rows, lines], float32.
    """
    rows, parts = materialize(rows), _halves(lines, rows.shape[-2])
    found = [(row[..., None, :] * part).sum(-1) for row in rows.unbind(-2) for part in parts]
    return torch.cat(found, dim=-1).unflatten(-1, (rows.shape[-2], lines.shape[-2]))


def weighted_sums(weights: Tensor, lines: Tensor) -> Tensor:
    """The sum of all lines for each row, weighted.

    Args:
        weights: of a few rows [..., rows, lines], float32.
        lines: many [..., lines, dim], of any type that becomes float32.

    Returns:
        [..., rows, dim], float32.
    """
    weights, parts = materialize(weights), _columns(lines, weights.shape[-2])
    found = [(row[..., None] * part).sum(-2) for row in weights.unbind(-2) for part in parts]
    return torch.cat(found, dim=-1).unflatten(-1, (weights.shape[-2], lines.shape[-1]))


def _halves(lines: Tensor, rows: int) -> list[Tensor]:
    """Lines in one loop with those that lie half of them further, for one row: processors fetch
    ahead what is read in order, and two such streams come faster than one. Rows have sums of their
    own, and short lists are read before that tells.
    """
    count, dim = lines.shape[-2:]
    apart = rows == 1 and count % 2 == 0 and count * dim >= APART
    return [part.float() for part in lines.chunk(2 if apart else 1, dim=-2)]


def _columns(lines: Tensor, rows: int) -> list[Tensor]:
    """Lines by as many numbers as come from memory at once, all in one loop: one after another,
    each loop would jump from line to line. Where their sums do not fit into registers it is jumped.
    """
    dim, width = lines.shape[-1], CACHE_LINE // lines.element_size()
    fit = dim % width == 0 and rows * dim <= SUMS
    return [part.float() for part in lines.split(width if fit else dim, dim=-1)]
