"""Types of the kernels. All implementations of a kernel have the same type.

The kernels' own files say what the arguments mean and which shapes they have. *Answers* are the
attention outputs of queries. A *peak* is the largest absolute value in a quantized vector, or in a
group of its numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor


class WindowChunk(NamedTuple):
    """Queries of a piece of a prompt with no fold between them, and the tokens that they see.

    The index of a token is its place among the tokens that are passed to the kernel, which are in
    the order of the stream and do not include the front.

    Attributes:
        first: index of the first of these queries in the piece.
        queries: how many queries there are.
        front: how many slots of the front are in use.
        start: index of the first token after the front that the queries see.
        boundary: index of the first token that they see unquantized.
        own: index of the first query's own token.
    """

    first: int
    queries: int
    front: int
    start: int
    boundary: int
    own: int


QuantizedVectors = tuple[Tensor, Tensor, int]
"""Quantized vectors: numbers as they are stored, their peaks, and the number of steps from 0 to a
peak.
"""
Coded = tuple[QuantizedVectors, QuantizedVectors]
"""Quantized keys and values."""
Pair = tuple[Tensor, Tensor]
Mask = Tensor | None
Span = tuple[int, int]
"""The first slot that is read, and the slot after the last one."""

WalkKernel = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(products, gain, u, free) -> signs."""
PairWalkKernel = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, float, float, float], Tensor
]
"""(keys, values, a, b, u, free, rate, constant, gamma, steepest) -> signs."""
DrawKernel = Callable[[list[int], int, Tensor, int], Tensor]
"""(state of each row, first head, positions, count) -> uniform numbers."""
DistanceKernel = Callable[[Tensor, Tensor], Tensor]
"""(keys, others) -> distances."""
ResampleKernel = Callable[[Tensor, Tensor, Tensor, Tensor], Pair]
"""(total, weight, into, u) -> last arrivals, new totals."""
DecodeKernel = Callable[[Tensor, Tensor, Tensor, Mask, float, Span], Tensor]
"""(queries, keys, values, mask, scale, slots) -> answers."""
QuantizedDecodeKernel = Callable[[Tensor, Coded, Tensor, Tensor, Mask, float, Span], Tensor]
"""(queries, coded, keys, values, mask, scale, slots) -> answers."""
RotatedDecodeKernel = Callable[
    [Tensor, Coded, tuple[int, int], Tensor, Tensor, Mask, float, Span], Tensor
]
"""(queries, coded, blocks, keys, values, mask, scale, slots) -> answers."""
CausalKernel = Callable[[Tensor, Tensor, Tensor, Mask, float, Pair | None, Coded | None], Tensor]
"""(queries, keys, values, mask, scale, factors, coded) -> answers."""
ReceivedKernel = Callable[[Tensor, Tensor, Tensor, Mask, float, Coded | None], Pair | None]
"""(queries, keys, values, mask, scale, coded) -> answers, attention received."""
WindowKernel = Callable[[Tensor, Pair, Pair, Pair, Sequence[WindowChunk], float], Tensor]
"""(queries, exact, coded, front, chunks, scale) -> answers."""
RotateKernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(keys, positions to move by, turns per position, output) -> moved keys."""


class WeightedDecodeKernel(Protocol):
    """Computes attention of one query per head over slots with two log-weights."""

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Mask = None,
    ) -> Tensor:
        """Return the answers."""


class FarthestKernel(Protocol):
    """Picks the farthest slots first."""

    def __call__(self, keys: Tensor, among: Tensor, k: int, weight: Tensor | None = None) -> Tensor:
        """Return the order in which slots are picked."""


class QuantizeKernel(Protocol):
    """Quantizes vectors into given tensors."""

    def __call__(
        self, x: Tensor, codes: Tensor, peaks: Tensor, levels: int, *bounds: float
    ) -> None:
        """Write the codes and peaks of vectors."""


class DequantizeKernel(Protocol):
    """Reads quantized vectors into a given tensor."""

    def __call__(self, codes: Tensor, peaks: Tensor, levels: int, out: Tensor, *block: int) -> None:
        """Write the vectors of codes and peaks."""
