"""The inner products a walk needs, of tokens taken as vectors: see `weir.halving`.

Only those above the diagonal are made, some blocks at a time and panel by panel, so that what one
step writes is still in the processor's cache when the next one reads it. Knows nothing about signs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_PANEL = 128
"""Rows multiplied at once, an even number: more make products below the diagonal for nothing, fewer
take longer for each.
"""
_IN_CACHE = 2**19
"""Inner products made at once on the CPU: 2 MB."""


@dataclass(frozen=True)
class Gram:
    """Inner products of each block, and how long its vectors are.

    So that nothing overflows, both are divided by e^top, and by the square of the largest weight.

    Attributes:
        products: of vectors i < j [blocks, n, n], float32; what stands elsewhere means nothing.
        top: the largest <k, k> times the rate [blocks].
        radius: the largest squared length of a token's vector, or more [blocks].
    """

    products: Tensor
    top: Tensor
    radius: Tensor


def gram(
    keys: Tensor,
    values: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    rate: float,
    constant: float,
    pairs: bool,
) -> Gram:
    """The inner products of the tokens of each block.

    Args:
        keys: [blocks, tokens, key_dim]; a block's are shifted by their mean.
        values: [blocks, tokens, value_dim].
        a, b: log-weights [blocks, tokens]; both -inf where there is no token.
        rate: the factor of <k_i, k_j>.
        constant: how much the denominator counts.
        pairs: the vectors are not the tokens, but the differences of neighbours, of which there are
            half as many; the number of tokens must be even.
    """
    blocks, tokens = a.shape
    n = tokens // 2 if pairs else tokens
    products = keys.new_empty((blocks, n, n), dtype=torch.float32)
    at_once = max(1, _IN_CACHE // max(1, tokens**2)) if keys.device.type == "cpu" else blocks
    tops, radii = [], []
    parts = (t.split(at_once) for t in (products, keys, values, a, b))
    for out, key, value, above, below in zip(*parts, strict=True):
        features = _Features.of(key, value, above, below, rate, constant)
        if pairs:
            features.differences(out)
        else:
            features.products(out)
        tops.append(features.top)
        radii.append(features.radius())
    return Gram(products, torch.cat(tops), torch.cat(radii))


def held(a: Tensor, b: Tensor) -> Tensor:
    """Where log-weights are those of a token, bool."""
    return ~(a.isneginf() & b.isneginf())


@dataclass(frozen=True)
class _Features:
    """Tokens of some blocks, ready to be multiplied.

    Attributes:
        keys: less their mean [blocks, tokens, key_dim], float32.
        sums: what tokens add to both sums: e^a v over the largest e^a, and e^b over the largest,
            times the root of the constant [blocks, tokens, value_dim + 1], float32.
        rate: as in `gram`.
        top: as in `Gram`.
    """

    keys: Tensor
    sums: Tensor
    rate: float
    top: Tensor

    @classmethod
    def of(
        cls, keys: Tensor, values: Tensor, a: Tensor, b: Tensor, rate: float, constant: float
    ) -> _Features:
        """Features of tokens; arguments as in `gram`."""
        there = held(a, b)[..., None]
        keys, values = keys.float(), values.float()
        full = bool(there.all())
        if not full:
            keys, values = (t.masked_fill(~there, 0.0) for t in (keys, values))
        keys = keys - keys.sum(dim=1, keepdim=True) / there.sum(dim=1, keepdim=True).clamp_min(1)
        if not full:
            keys.masked_fill_(~there, 0.0)
        sums = values.new_empty((*values.shape[:2], values.shape[2] + 1))
        torch.mul(values, _relative(a)[..., None], out=sums[..., :-1])
        torch.mul(_relative(b), math.sqrt(constant), out=sums[..., -1])
        return cls(keys, sums, rate, rate * _longest(keys))

    def radius(self) -> Tensor:
        """As in `Gram`."""
        return _longest(self.sums[..., :-1]) + _longest(self.sums[..., -1:])

    def products(self, out: Tensor) -> None:
        """Those of tokens, into `out` [blocks, tokens, tokens]."""
        for start in range(0, out.shape[1], _PANEL):
            rows = slice(start, start + _PANEL)
            out[:, rows, start:] = self._panel(rows, slice(start, None))

    def differences(self, out: Tensor) -> None:
        """Those of first less second of each two, into `out` [blocks, tokens / 2, tokens / 2]."""
        for start in range(0, 2 * out.shape[1], _PANEL):
            rows = slice(start, start + _PANEL)
            change = self._panel(rows, slice(start, None, 2))
            change -= self._panel(rows, slice(start + 1, None, 2))
            part = out[:, start // 2 : (start + _PANEL) // 2, start // 2 :]
            torch.sub(change[:, 0::2], change[:, 1::2], out=part)

    def _panel(self, rows: slice, columns: slice) -> Tensor:
        """Of some tokens with others [blocks, rows, columns]:
        e^(rate <k_i, k_j> - top) <sums_i, sums_j>.
        """
        keys, sums = self.keys, self.sums
        top = self.top[:, None, None]
        logits = torch.baddbmm(top, keys[:, rows], keys[:, columns].mT, beta=-1, alpha=self.rate)
        return logits.exp_().mul_(sums[:, rows] @ sums[:, columns].mT)


def _longest(vectors: Tensor) -> Tensor:
    """The largest squared length of a block's vectors [blocks]."""
    return vectors.norm(dim=2).amax(dim=1).square()


def _relative(weight: Tensor) -> Tensor:
    """e^weight over the largest of its block; 0 where there is no weight."""
    top = weight.amax(dim=-1, keepdim=True)
    return (weight - top.masked_fill(top.isneginf(), 0.0)).exp()
