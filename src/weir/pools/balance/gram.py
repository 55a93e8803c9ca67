"""The inner products a walk needs, of tokens taken as vectors: see `weir.pools.balance.halving`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_PANEL = 128
"""Rows multiplied at once, an even number."""


@dataclass(frozen=True)
class Gram:
    """The tokens of some blocks, ready to be multiplied.

    So that nothing overflows, products are divided by e^top, and weights by the largest of a block.
    In the authors' code weights are divided by nothing: a walk leans the harder the more its tokens
    stand for.

    Attributes:
        keys: less the mean of their block [blocks, tokens, key_dim], float32.
        sums: what tokens add to both sums: e^a v over the largest e^a, and e^b over the largest,
            times the root of the constant [blocks, tokens, value_dim + 1], float32.
        rate: the factor of <k_i, k_j>.
        top: the largest <k, k> times the rate [blocks].
        weight: the logarithm of what else products were divided by [blocks], to be made good as in
            the authors' code; otherwise 0.
    """

    keys: Tensor
    sums: Tensor
    rate: float
    top: Tensor
    weight: Tensor

    @classmethod
    def of(
        cls,
        keys: Tensor,
        values: Tensor,
        a: Tensor,
        b: Tensor,
        rate: float,
        constant: float,
        released: bool = False,
    ) -> Gram:
        """From tokens of weights a, b [blocks, tokens], both -inf where there is none.

        Args:
            keys: [blocks, tokens, key_dim].
            values: [blocks, tokens, value_dim].
            a, b: log-weights.
            rate: the factor of <k_i, k_j>.
            constant: how much the denominator counts.
            released: weights as in the authors' code.
        """
        there = held(a, b)[..., None]
        keys, values = keys.float(), values.float()
        full = bool(there.all())
        if not full:
            keys, values = (t.masked_fill(~there, 0.0) for t in (keys, values))
        keys = keys - keys.sum(dim=1, keepdim=True) / there.sum(dim=1, keepdim=True).clamp_min(1)
        if not full:
            keys.masked_fill_(~there, 0.0)
        sums = values.new_empty((*values.shape[:2], values.shape[2] + 1))
        above, below, weight = _released(a, b) if released else _relative(a, b)
        torch.mul(values, above[..., None], out=sums[..., :-1])
        torch.mul(below, math.sqrt(constant), out=sums[..., -1])
        return cls(keys, sums, rate, rate * _longest(keys), weight)

    def radius(self) -> Tensor:
        """The largest squared length of a token's vector, or more, over e^top [blocks]."""
        return _longest(self.sums[..., :-1]) + _longest(self.sums[..., -1:])

    def products(self) -> Tensor:
        """Of tokens i < j [blocks, tokens, tokens]; what stands elsewhere means nothing."""
        blocks, tokens, _ = self.keys.shape
        out = self.keys.new_empty((blocks, tokens, tokens))
        for start in range(0, tokens, _PANEL):
            rows = slice(start, start + _PANEL)
            out[:, rows, start:] = self._panel(rows, slice(start, None))
        return out

    def differences(self) -> Tensor:
        """Of the differences of neighbors, first less second, for pairs i < j
        [blocks, tokens / 2, tokens / 2]; what stands elsewhere means nothing.
        """
        blocks, tokens, _ = self.keys.shape
        out = self.keys.new_empty((blocks, tokens // 2, tokens // 2))
        for start in range(0, tokens, _PANEL):
            rows = slice(start, start + _PANEL)
            change = self._panel(rows, slice(start, None, 2))
            change -= self._panel(rows, slice(start + 1, None, 2))
            part = out[:, start // 2 : (start + _PANEL) // 2, start // 2 :]
            torch.sub(change[:, 0::2], change[:, 1::2], out=part)
        return out

    def _panel(self, rows: slice, columns: slice) -> Tensor:
        """Of some tokens with others [blocks, rows, columns]:
        e^(rate <k_i, k_j> - top) <sums_i, sums_j>.
        """
        keys, sums = self.keys, self.sums
        top = self.top[:, None, None]
        logits = torch.baddbmm(top, keys[:, rows], keys[:, columns].mT, beta=-1, alpha=self.rate)
        return logits.exp_().mul_(sums[:, rows] @ sums[:, columns].mT)


def held(a: Tensor, b: Tensor) -> Tensor:
    """Find the places with a token by their log-weights, bool."""
    return ~(a.isneginf() & b.isneginf())


def _longest(vectors: Tensor) -> Tensor:
    """The largest squared length of a block's vectors [blocks]."""
    return vectors.norm(dim=2).amax(dim=1).square()


def _relative(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(e^a over the largest of its block, e^b over the largest, 0 for each block)."""
    return (a - _largest(a)).exp(), (b - _largest(b)).exp(), a.new_zeros(a.shape[0])


def _released(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(e^a, 1 for each token, both over the largest e^a; what products are divided by, its log).

    A token that is in the denominator alone (separate sets) has a value of 1, which is weighted.
    """
    silent = a.isneginf()
    most = _largest(torch.where(silent, b, a))
    below = torch.where(silent, b, 0.0).masked_fill(b.isneginf(), -torch.inf)
    return (a - most).exp(), (below - most).exp(), 2 * most[:, 0]


def _largest(weight: Tensor) -> Tensor:
    """The largest log-weight of each block [blocks, 1]; 0 where there is no weight."""
    top = weight.amax(dim=-1, keepdim=True)
    return top.masked_fill(top.isneginf(), 0.0)
