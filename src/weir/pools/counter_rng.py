"""A counter-based random number generator: a draw depends on its key, not on when it is made.

A draw is a function of (seed, layer, pool, purpose, head, position, index), as in Salmon et al.
2011, "Parallel Random Numbers: As Easy as 1, 2, 3". It is the same however a stream is cut into
calls, in any row of a batch, and after a session was restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from weir import kernels
from weir.errors import WeirError, in_words


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of SplitMix64 (Steele, Lea and Flood 2014) to int64 that wraps around."""
    x = (x ^ _shift(x, 30)).mul_(-0x40A7B892E31B1A47)
    x = (x ^ _shift(x, 27)).mul_(-0x6B2FB644ECCEEE15)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros, as for unsigned numbers."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _wrap(x: int) -> int:
    """Reduce modulo 2^64, to the signed number that an int64 holds."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _mix_in(x: Tensor, part: int | Tensor) -> Tensor:
    """Mix another part of a key into `x`."""
    step = part * -0x61C8864680B583EB + 0x632BE59BD9B4E019
    return _mix(x + (_wrap(step) if isinstance(step, int) else step))


@lru_cache(maxsize=4096)
def _start(seed: int, layer: int, pool: int, purpose: int) -> int:
    """Mix the seed with the other parts of a key that all tokens share."""
    x = torch.tensor([_wrap(seed)])
    return int(_mix_in(_mix_in(x, layer + (pool << 32)), purpose))


@dataclass(frozen=True)
class CounterRNG:
    """The random numbers of one pool in one layer of one cache.

    Attributes:
        seed: the seed of the stream; a tuple has one for each row of the batch.
        layer: the number of the layer.
        pool: the place of the pool in its pipe, so that two pools draw different numbers.
        first: the layer's first KV head in this process, if tensor parallelism splits the heads.
        heads: the KV heads that draw, numbered from `first` on; None for all heads of the layer.
    """

    seed: int | tuple[int, ...]
    layer: int = 0
    pool: int = 0
    first: int = 0
    heads: tuple[int, ...] | None = None

    def of_rows(self, rows: Sequence[int]) -> CounterRNG:
        """Return the generator of some rows of the batch, in this order."""
        if isinstance(self.seed, int):
            return self
        return replace(self, seed=tuple(self.seed[row] for row in rows))

    def of_layer(self) -> CounterRNG:
        """Return a generator that all heads of the layer share, in every process."""
        return replace(self, first=0, heads=None)

    def uniform(self, purpose: int, position: Tensor, index: int | Tensor = 0) -> Tensor:
        """Draw uniform numbers in [0, 1), float64, one for each entry of `position`.

        Args:
            purpose: the purpose of the draw; each pool numbers its own.
            position: places in the stream [batch, kv_heads or 1, n], int64.
            index: a number, or a tensor that broadcasts with `position`, for several draws for one
                token.
        """
        if isinstance(index, int) and index == 0:
            return self.uniforms(purpose, position, 1)[..., 0]
        return _uniform(_mix_in(self._mix_tokens(purpose, position), index))

    def uniforms(self, purpose: int, position: Tensor, count: int) -> Tensor:
        """Draw `uniform` with each index below `count` [batch, kv_heads or 1, n, count]."""
        kernel = kernels.draw_uniform(position.device)
        if kernel is not None and self.heads is None:
            starts = self._start_rows(purpose, position.shape[0])
            return kernel(starts, self.first, position, count)
        mixed = self._mix_tokens(purpose, position)[..., None]
        return _uniform(_mix_in(mixed, torch.arange(count, device=position.device)))

    def _mix_tokens(self, purpose: int, position: Tensor) -> Tensor:
        """Mix all parts of a key except the index [batch, kv_heads, n]."""
        heads = torch.arange(position.shape[1], device=position.device)
        if self.heads is not None:
            heads = torch.tensor(self.heads[: len(heads)], device=position.device)
        heads = heads[None, :, None] + self.first
        started = self._start_rows(purpose, position.shape[0])
        if len(set(started)) == 1:
            rows = position.new_full((1,), started[0])
        else:
            rows = position.new_tensor(started)[:, None, None]
        return _mix_in(_mix_in(rows, heads), position)

    def _start_rows(self, purpose: int, batch: int) -> list[int]:
        """Mix seed, layer, pool and purpose of each row."""
        seeds = self.seed if isinstance(self.seed, tuple) else (self.seed,) * batch
        if len(seeds) != batch:
            raise WeirError(
                f"the generator has seeds for {in_words(len(seeds), 'row')}, but the batch has "
                f"{in_words(batch, 'row')}"
            )
        return [_start(seed, self.layer, self.pool, purpose) for seed in seeds]


def _uniform(x: Tensor) -> Tensor:
    """Make the upper 53 bits a number in [0, 1), float64."""
    return _shift(x, 11).to(torch.float64).mul_(2.0**-53)
