"""Random numbers by name: a draw depends on what it is for, not on when it is made.

A draw is a function of (seed, layer, pool, purpose, position, head, index). So a token is given the
same numbers however its stream was cut into calls, whichever row of a batch the stream is, and
after a session was saved and restored; there is no state to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from weir import kernels
from weir.errors import WeirError


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014), on int64 that wraps around."""
    x = (x ^ _shift(x, 30)).mul_(-0x40A7B892E31B1A47)
    x = (x ^ _shift(x, 27)).mul_(-0x6B2FB644ECCEEE15)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """A right shift that fills with zeros, as for unsigned numbers."""
    return (x >> by).bitwise_and_((1 << (64 - by)) - 1)


def _wrapped(x: int) -> int:
    """Modulo 2^64, as the signed number an int64 holds."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def _step(x: Tensor, part: int | Tensor) -> Tensor:
    """`x`, and what a part of a draw's name makes of it."""
    step = part * -0x61C8864680B583EB + 0x632BE59BD9B4E019
    return _mix(x + (_wrapped(step) if isinstance(step, int) else step))


@lru_cache(maxsize=4096)
def _begin(seed: int, layer: int, pool: int, purpose: int) -> int:
    """What the parts of a draw's name that are the same for all tokens make of a seed."""
    x = torch.tensor([_wrapped(seed)])
    return int(_step(_step(x, layer + (pool << 32)), purpose))


@dataclass(frozen=True)
class CounterRNG:
    """The draws of one pool, in one layer of one cache.

    Attributes:
        seed: the stream's; or a tuple with one for each row of the batch, where rows are streams
            of their own.
        layer: which layer.
        pool: which pool of the pipe, so that two pools draw different numbers for a token.
        first: the first KV head of the layer that is here, where heads are shared out over
            processes: each draws what it would in one process.
    """

    seed: int | tuple[int, ...]
    layer: int = 0
    pool: int = 0
    first: int = 0

    def of_rows(self, rows: Sequence[int]) -> CounterRNG:
        """The draws of some rows of the batch, in this order: for tensors that hold only those."""
        if isinstance(self.seed, int):
            return self
        return replace(self, seed=tuple(self.seed[row] for row in rows))

    def of_layer(self) -> CounterRNG:
        """CounterRNG that all heads of the layer share, wherever they are."""
        return replace(self, first=0)

    def uniform(self, purpose: int, position: Tensor, index: int | Tensor = 0) -> Tensor:
        """Uniform numbers in [0, 1), float64, one for each entry of `position`.

        Args:
            purpose: what the draw is for; a pool numbers its own uses.
            position: places in the stream [batch, kv_heads or 1, n], int64; with kv_heads, each
                head has draws of its own, and with a seed for each row each row has, too.
            index: a number, or a tensor that broadcasts with `position`, that tells several draws
                for one token apart.

        Raises:
            WeirError: there is a seed for each row, and the batch has more or fewer rows.
        """
        if isinstance(index, int) and index == 0:
            made = self._by_kernel(purpose, position, 1)
            if made is not None:
                return made[..., 0]
        return _uniform(_step(self._of_tokens(purpose, position), index))

    def several(self, purpose: int, position: Tensor, count: int) -> Tensor:
        """`uniform` with every index from 0 to `count` [batch, kv_heads or 1, n, count]."""
        made = self._by_kernel(purpose, position, count)
        if made is not None:
            return made
        of_tokens = self._of_tokens(purpose, position)[..., None]
        return _uniform(_step(of_tokens, torch.arange(count, device=position.device)))

    def _of_tokens(self, purpose: int, position: Tensor) -> Tensor:
        """What all parts of a draw's name but the index make of the seed [batch, kv_heads, n]."""
        heads = torch.arange(position.shape[1], device=position.device)[None, :, None] + self.first
        return _step(_step(self._of_rows(purpose, position), heads), position)

    def _of_rows(self, purpose: int, position: Tensor) -> Tensor:
        """What seed, layer, pool and purpose make [1], or [batch, 1, 1] where seeds differ."""
        begun = self._begun(purpose, position.shape[0])
        if len(set(begun)) == 1:
            return position.new_full((1,), begun[0])
        return position.new_tensor(begun)[:, None, None]

    def _begun(self, purpose: int, batch: int) -> list[int]:
        """The same, of each row."""
        seeds = self.seed if isinstance(self.seed, tuple) else (self.seed,) * batch
        if len(seeds) != batch:
            raise WeirError(f"there are draws for {len(seeds)} rows, and the batch has {batch}")
        return [_begin(seed, self.layer, self.pool, purpose) for seed in seeds]

    def _by_kernel(self, purpose: int, position: Tensor, count: int) -> Tensor | None:
        """`several`; None where no kernel makes it."""
        kernel = kernels.draw_uniform(position.device)
        if kernel is None:
            return None
        made: Tensor = kernel(self._begun(purpose, position.shape[0]), self.first, position, count)
        return made


def _uniform(x: Tensor) -> Tensor:
    """The upper 53 bits as a number in [0, 1), float64."""
    return _shift(x, 11).to(torch.float64).mul_(2.0**-53)
