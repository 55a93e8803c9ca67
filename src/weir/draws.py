"""Random numbers by name: a draw depends on what it is for, not on when it is made.

A draw is a function of (seed, layer, pool, purpose, position, head, index). So the same token meets
the same luck however the stream was cut into calls, whichever row of a batch it came in, and after
a session was saved and restored; there is no state to keep.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), on int64 that wraps around."""
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


def _shift(x: Tensor, by: int) -> Tensor:
    """A right shift that fills with zeros, as for unsigned numbers."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _wrapped(x: int) -> int:
    """Modulo 2^64, as the signed number an int64 holds."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass(frozen=True)
class Draws:
    """The draws of one pool, in one layer of one cache.

    Attributes:
        seed: the cache's.
        layer: which layer.
        pool: which pool of the pipe, so that two pools never share their luck over a token.
    """

    seed: int
    layer: int = 0
    pool: int = 0

    def uniform(self, purpose: int, position: Tensor, index: int | Tensor = 0) -> Tensor:
        """Uniform numbers in [0, 1), float64, one for each entry of `position`.

        Args:
            purpose: what the draw is for; a pool numbers its own uses.
            position: places in the stream [batch, kv_heads or 1, n], int64; with kv_heads, each
                head has draws of its own.
            index: a number, or a tensor that broadcasts with `position`, that tells several draws
                for one token apart.
        """
        heads = torch.arange(position.shape[1], device=position.device)[None, :, None]
        x = position.new_full((1,), _wrapped(self.seed))
        for part in (self.layer + (self.pool << 32), purpose, heads, position, index):
            step = part * -0x61C8864680B583EB + 0x632BE59BD9B4E019
            x = _mix(x + (_wrapped(step) if isinstance(step, int) else step))
        return _shift(x, 11).to(torch.float64) * 2.0**-53
