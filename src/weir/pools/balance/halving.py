"""SoftmaxBalance: halve a set of tokens so that both halves answer every query alike.

BalanceKV (Kochetkova et al. 2025, arXiv:2502.07861), section 3.1, Algorithm 2: a walk through the
tokens gives each a sign, chosen against the sum of the tokens so far, so that the sums with sign +
and with sign - stay close for all queries at once. Appendix B runs it over blocks in parallel.

A token is a vector: it adds e^a v to the numerator and e^b to the denominator, and e^<k, q> is an
inner product of features of k and of q. The walk needs only the inner products

    y_ij = e^(t <k_i, k_j> scale) * (e^(a_i + a_j) <v_i, v_j> + constant * e^(b_i + b_j)),

with the temperature t, and keys shifted by the mean of their block, which does not change a
softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from weir import kernels
from weir.errors import WeirError
from weir.pools.parameters import Factor
from weir.slab import EMPTY

LOG_2 = math.log(2)
Halves = Literal["pairs", "authors", "paper"]
_PANEL = 128
"""Rows multiplied at a time, an even number."""
_AT_ONCE = 2**24
"""Inner products in memory at a time. Further blocks are processed later."""
_IN_CACHE = 2**19
"""The same on a CPU with a kernel: 2 MB, which are still in the CPU's cache when the walk reads
them.
"""
_STEEPEST = 60.0
"""Limit of x in the gain of a walk, gamma e^x. A larger x would change nothing, because at this
limit practically every step of the walk is certain.
"""


class Sets(NamedTuple):
    """Sets of tokens, each cut into blocks of the same size [sets, blocks, tokens].

    Keys and values have one more dimension. Log-weights a and b are both -inf where there is no
    token; u is uniform in [0, 1).
    """

    keys: Tensor
    values: Tensor
    a: Tensor
    b: Tensor
    u: Tensor

    @property
    def held(self) -> Tensor:
        """The places with a token [sets, blocks, tokens], bool."""
        return _held(self.a, self.b)

    def even(self) -> Sets:
        """Return the sets with one more empty place in each block, if the number of places is
        odd.
        """
        if self.a.shape[2] % 2 == 0:
            return self
        more = Sets(*(torch.cat([t, t[:, :, :1]], dim=2) for t in self))
        more.a[:, :, -1] = more.b[:, :, -1] = -torch.inf
        return more


@dataclass(frozen=True)
class Gram:
    """The inner products of the tokens of some blocks.

    To avoid overflow, products are divided by e^top, and weights by the largest of a block. The
    authors' code (`released`) does not divide weights, so the more a walk's tokens represent, the
    more strongly it counteracts its sum. For this rule, `weight` makes up for the division.

    Attributes:
        keys: the keys minus the mean of their block [blocks, tokens, key_dim], float32.
        sums: what tokens add to both sums: e^a v divided by the largest e^a, and e^b divided by the
            largest, times the root of the constant [blocks, tokens, value_dim + 1], float32. In the
            rule of the authors' code, tokens of the numerator count 1 instead of e^b in the
            denominator. Both sums are then divided by the largest e^a, or e^b of a token that is
            only in the denominator.
        rate: the factor of <k_i, k_j>.
        top: the largest <k, k> times the rate [blocks].
        weight: for the rule of the authors' code, the logarithm of the number by which dividing the
            weights has divided the products; otherwise 0 [blocks].
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
        """Make the products from tokens [blocks, tokens, dim] with log-weights [blocks, tokens],
        -inf for none.
        """
        there = _held(a, b)[..., None]
        keys, values = keys.float(), values.float()
        full = bool(there.all())
        if not full:
            keys, values = (t.masked_fill(~there, 0.0) for t in (keys, values))
        keys = keys - keys.sum(dim=1, keepdim=True) / there.sum(dim=1, keepdim=True).clamp_min(1)
        if not full:
            keys.masked_fill_(~there, 0.0)
        silent = a.isneginf()
        if released:
            # A token that is only in the denominator has a value of 1, which is weighted.
            most = _largest(torch.where(silent, b, a))
            b = torch.where(silent, b, 0.0).masked_fill(b.isneginf(), -torch.inf)
            above, below, weight = (a - most).exp(), (b - most).exp(), 2 * most[:, 0]
        else:
            above, below = (a - _largest(a)).exp(), (b - _largest(b)).exp()
            weight = a.new_zeros(a.shape[0])
        sums = values.new_empty((*values.shape[:2], values.shape[2] + 1))
        torch.mul(values, above[..., None], out=sums[..., :-1])
        torch.mul(below, math.sqrt(constant), out=sums[..., -1])
        return cls(keys, sums, rate, rate * _longest(keys), weight)

    def products(self, pairs: bool) -> Tensor:
        """Return products for i < j of tokens [blocks, tokens, tokens].

        With `pairs`, returns those of the differences of neighbors [blocks, tokens / 2, tokens /
        2]. Other entries have no meaning.
        """
        blocks, tokens, _ = self.keys.shape
        part = 2 if pairs else 1
        out = self.keys.new_empty((blocks, tokens // part, tokens // part))
        for start in range(0, tokens, _PANEL):
            rows = slice(start, start + _PANEL)
            change = self._panel(rows, slice(start, None, part))
            found = out[:, start // part : (start + _PANEL) // part, start // part :]
            if pairs:
                change -= self._panel(rows, slice(start + 1, None, 2))
                torch.sub(change[:, 0::2], change[:, 1::2], out=found)
            else:
                found.copy_(change)
        return out

    def _panel(self, rows: slice, columns: slice) -> Tensor:
        """Return products of some tokens with others: e^(rate <k_i, k_j> - top) <sums_i,
        sums_j>.
        """
        keys, sums = self.keys, self.sums
        top = self.top[:, None, None]
        logits = torch.baddbmm(top, keys[:, rows], keys[:, columns].mT, beta=-1, alpha=self.rate)
        return logits.exp_().mul_(sums[:, rows] @ sums[:, columns].mT)


@dataclass(frozen=True)
class Halving:
    """The rule by which a set of tokens is halved, with parameters like those of `Balance`.

    `flat` counts all remaining tokens double in the denominator, as in the authors' code.
    """

    halves: Halves = "pairs"
    gamma: Factor | None = 4.0
    temperature: Factor = 0.1
    constant: Factor = 0.025
    flat: bool = False

    def __post_init__(self) -> None:
        if self.flat and self.halves != "authors":
            raise WeirError(
                "sets=flat needs halves=authors, whose halving gives tokens different weights. "
                f"With halves={self.halves}, the shared denominator is already the flat one. Use "
                "halves=authors or sets=shared."
            )

    def halve(self, sets: Sets, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Halve each set. The walk goes through each of its blocks separately.

        A token without a partner, or a set of one token, stays unchanged.

        Returns:
            (index, a, b): the tokens that stay, as places in the whole set, in order, with -1 for
                none [sets, blocks * ceil(tokens / 2)]; and their new log-weights.
        """
        sets = sets.even()
        if self.halves == "pairs" and bool(sets.held.all()):
            return self._of_whole_pairs(sets, scale)
        if self.halves == "pairs":
            stays, more = self._one_of_each_pair(sets, scale)
            below = more
        else:
            u, there = sets.u, sets.held
            if self.halves == "authors":
                # The released code gives the first token of a block the sign +: -1 is below any
                # probability.
                u = u.index_fill(2, u.new_zeros(1, dtype=torch.int64), -1.0)
            signs = self._signs(sets, scale, u, there)
            stays, more = _authors(signs) if self.halves == "authors" else _smaller(signs)
            alone = there.sum(dim=(1, 2), keepdim=True) == 1
            stays = torch.where(alone, there, stays)
            below = torch.full_like(more, LOG_2) if self.flat else more
            more, below = more.masked_fill(alone, 0.0), below.masked_fill(alone, 0.0)
        half = sets.a.shape[1] * sets.a.shape[2] // 2
        stays, a, b = (t.flatten(1) for t in (stays, sets.a + more, sets.b + below))
        order = (~stays).to(torch.uint8).argsort(dim=1, stable=True)[:, :half]
        nobody = ~stays.gather(1, order)
        a, b = (t.gather(1, order).masked_fill(nobody, -torch.inf) for t in (a, b))
        return order.masked_fill(nobody, EMPTY), a, b

    def _signs(self, sets: Sets, scale: float, u: Tensor, free: Tensor) -> Tensor:
        """Compute the signs of tokens, or of pairs, by a walk through each block [sets, blocks, n],
        float32, 0 for none.

        `free` says which ones take part.
        """
        parts = [t.flatten(0, 1) for t in (*sets[:4], u, free)]
        rate = scale * self.temperature
        whole = self.halves == "pairs" and self.gamma is not None and bool(sets.held.all())
        if whole and (by_pairs := kernels.walk_pairs(sets.keys)) is not None:
            assert self.gamma is not None
            keys, values, a, b, drawn, there = parts
            how = rate, self.constant, self.gamma, _STEEPEST
            found = by_pairs(keys, values, a, b, drawn, there, *how)
            return found.view(free.shape)
        kernel = kernels.walk(u.device)
        in_cache = u.device.type == "cpu" and kernel is not None
        at_once = max(1, (_IN_CACHE if in_cache else _AT_ONCE) // sets.a.shape[2] ** 2)
        # All of them at once, as in most streams: splitting them would cost calls.
        few = len(parts[0]) <= at_once
        pieces = [parts] if few else zip(*(t.split(at_once) for t in parts), strict=True)
        signs = []
        for keys, values, a, b, drawn, there in pieces:
            gram = Gram.of(keys, values, a, b, rate, self.constant, self.halves == "authors")
            products = gram.products(pairs=self.halves == "pairs")
            signs.append((kernel or walk)(products, self._gain(gram, a, b), drawn, there))
        return (signs[0] if few else torch.cat(signs)).view(free.shape)

    def _gain(self, gram: Gram, a: Tensor, b: Tensor) -> Tensor:
        """Compute the gain of the walk in each block [blocks], for these log-weights of tokens."""
        if self.gamma is not None:
            return self.gamma * (gram.top + gram.weight).clamp_max(_STEEPEST).exp()
        count = _held(a, b).sum(dim=1).clamp_min(2)
        # An upper bound of the largest squared length of a token's vector, divided by e^top.
        radius = _longest(gram.sums[..., :-1]) + _longest(gram.sums[..., -1:])
        if self.halves == "pairs":
            # There are half as many vectors, and a difference is at most twice as long.
            count, radius = (count // 2).clamp_min(2), 4 * radius
        c = 60 * count.log()
        return 1 / (2 * c * radius).clamp_min(torch.finfo(torch.float32).tiny)

    def _of_whole_pairs(self, sets: Sets, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Halve like `halve` if every pair is complete: without sorting, because one of each pair
        stays.
        """
        (a1, a2), (b1, b2) = ((t[..., 0::2], t[..., 1::2]) for t in (sets.a, sets.b))
        if torch.equal(a1, a2) and torch.equal(b1, b2):
            alike = torch.ones_like(a1, dtype=torch.bool)
        else:
            alike = _close(a1, a2) & _close(b1, b2)
        u = sets.u[..., 0::2]
        first = self._signs(sets, scale, u, alike) > 0
        more: Tensor | float = LOG_2
        if not bool(alike.all()):
            first, more = _by_coin(first, alike, u, (a1, a2), (b1, b2))
        a, b = torch.where(first, a1, a2) + more, torch.where(first, b1, b2) + more
        pair = torch.arange(first[0].numel(), device=first.device)
        index = 2 * pair + (~first).flatten(1)
        return index, a.flatten(1), b.flatten(1)

    def _one_of_each_pair(self, sets: Sets, scale: float) -> tuple[Tensor, Tensor]:
        """Choose one token of each pair to represent both.

        Returns which tokens stay, and the additions to log-weights [sets, blocks, tokens]. In the
        walk, both tokens of a pair are equally likely to stay, which is unbiased only if their
        weights are equal. If they differ, a coin decides, with probabilities proportional to the
        weights.
        """
        (a1, a2), (b1, b2), (mine, other) = (
            (t[..., 0::2], t[..., 1::2]) for t in (sets.a, sets.b, sets.held)
        )
        alike = _close(a1, a2) & _close(b1, b2) & mine & other
        u = sets.u[..., 0::2]
        signs = self._signs(sets, scale, u, alike)
        first, more = _by_coin(signs > 0, alike, u, (a1, a2), (b1, b2))
        more = more.repeat_interleave(2, dim=-1).nan_to_num(0.0)
        return torch.stack([first & mine, ~first & other], dim=-1).flatten(-2), more


def walk(products: Tensor, gain: Tensor, u: Tensor, free: Tensor) -> Tensor:
    """The self-balancing walk (lines 5 to 11 of Algorithm 2): signs [..., n], float32, 0 for none.

    The paper's walk fails if a sum exceeds its bound. Here, the sign is then certain. This is the
    reference of the kernels: each product is added separately, in the order of the walk.

    Args:
        products: inner products [..., n, n], float32; only those above the diagonal are read.
        gain: + has probability 1/2 - gain * sum [...], float32.
        u: uniform numbers [..., n].
        free: which tokens take part [..., n], bool.
    """
    signs = torch.zeros_like(u, dtype=torch.float32)
    total = torch.zeros_like(signs)
    gain = gain.double()
    for j in range(signs.shape[-1]):
        plus = u[..., j] < 0.5 - gain * total[..., j]
        signs[..., j] = torch.where(plus, 1.0, -1.0) * free[..., j]
        total[..., j + 1 :] += signs[..., j, None] * products[..., j, j + 1 :]
    return signs


def check_block(block: int, limit: int | None = None) -> None:
    """Refuse a block that cannot be halved, or that has more than `limit` tokens."""
    if block < 2 or block % 2 or (limit is not None and block > limit):
        upward = "of at least 2" if limit is None else f"from 2 to {limit - limit % 2}"
        raise WeirError(f"block must be an even number of tokens {upward}, got {block}")


def _held(a: Tensor, b: Tensor) -> Tensor:
    """Find the places with a token by their log-weights, bool."""
    return ~(a.isneginf() & b.isneginf())


def _longest(vectors: Tensor) -> Tensor:
    """Return the largest squared length of a block's vectors [blocks]."""
    return vectors.norm(dim=2).amax(dim=1).square()


def _largest(weight: Tensor) -> Tensor:
    """Return the largest log-weight of each block [blocks, 1]; 0 where there is no weight."""
    top = weight.amax(dim=-1, keepdim=True)
    return top.masked_fill(top.isneginf(), 0.0)


def _by_coin(
    first: Tensor, alike: Tensor, u: Tensor, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Choose the tokens that stay in each pair, and the additions to their log-weights.

    The walk chooses if the weights of a pair are `alike`; otherwise, a coin does. All tensors are
    [..., pairs].
    """
    one, two = (torch.maximum(x, y).double() for x, y in zip(a, b, strict=True))
    share = (one - torch.logaddexp(one, two)).exp()
    first = torch.where(alike, first, u < share)
    more = -torch.where(first, share, 1 - share).log().float()
    return first, torch.where(alike, LOG_2, more)


def _close(one: Tensor, other: Tensor) -> Tensor:
    """Find log-weights that are equal up to rounding."""
    return (one == other) | ((one - other).abs() <= 1e-5)


def _smaller(signs: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the smaller side of each block, to be twice as heavy (lines 12 to 16 of Algorithm 2).

    Returns which tokens stay, and the additions to their log-weights.
    """
    plus, minus = signs > 0, signs < 0
    fewer = plus.sum(dim=-1, keepdim=True) <= minus.sum(dim=-1, keepdim=True)
    return torch.where(fewer, plus, minus), torch.full_like(signs, LOG_2)


def _authors(signs: Tensor) -> tuple[Tensor, Tensor]:
    """Choose exactly half of each set, by the rule of the released code.

    The rule finds the step at which one side of the walk has half of the tokens (the later step, if
    both sides reach half). Up to this step, the other side stays, twice as heavy. After it, all
    tokens stay with their weights. Returns which tokens stay, and the additions to their
    log-weights.
    """
    line = signs.flatten(1)
    half = (line != 0).sum(dim=1, keepdim=True) // 2
    steps = torch.arange(line.shape[1], device=line.device)
    reached = []
    for side in (line > 0, line < 0):
        full = side.cumsum(dim=1) >= half
        step = full.to(torch.uint8).argmax(dim=1, keepdim=True)
        reached.append(torch.where(full.any(dim=1, keepdim=True), step, EMPTY))
    plus, minus = reached
    until = steps <= torch.maximum(plus, minus)
    stays = torch.where(until, line == torch.where(plus > minus, -1.0, 1.0), line != 0)
    return stays.view_as(signs), torch.where(until, LOG_2, 0.0).view_as(signs)
