"""Helpers for tests of samples, which fold with thousands of seeds at once and measure how unlikely
the results are.

Each head of a single row draws with a different seed, so one fold tests thousands of seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weir.pools import Fold, Pool
from weir.pools.counter_rng import CounterRNG
from weir.slab import AttentionParams
from weir.slab.slots import Slots


@dataclass(frozen=True)
class ManySeeds:
    """Like `CounterRNG`, but head h draws the numbers that the first head draws with seed h.

    Attributes:
        table: the numbers [1, seeds, places].
    """

    table: Tensor

    @classmethod
    def of(cls, seeds: int, places: int) -> ManySeeds:
        """Return the draws of purpose 0 for the first places of a stream."""
        place = torch.arange(places)[None, None]
        return cls(torch.cat([CounterRNG(seed).uniform(0, place) for seed in range(seeds)], dim=1))

    def uniform(self, purpose: int, position: Tensor, index: int = 0) -> Tensor:
        """As `CounterRNG.uniform`."""
        assert (purpose, index) == (0, 0)
        return self.table.gather(2, position.clamp_min(0))


def arrivals(start: int, stop: int, heads: int, keys: Tensor | None = None) -> Slots:
    """Return tokens of one row, the same in all heads. `keys` [places, dim] are also the values."""
    position = torch.arange(start, stop).expand(1, heads, -1)
    weights = torch.zeros(position.shape)
    some = torch.zeros(stop, 1) if keys is None else keys
    some = some[start:stop].expand(1, heads, -1, -1)
    return Slots(some, some, weights, weights.clone(), position)


def folds(
    pool: Pool, draws: ManySeeds, cuts: list[int], keys: Tensor | None = None
) -> Iterator[tuple[int, Slots]]:
    """Fold arrivals up to each cut; yields (tokens that came, what is kept) after each."""
    heads = draws.table.shape[1]
    held = arrivals(0, 0, heads, keys)
    state = pool.state(held)
    start = 0
    for stop in cuts:
        fold = Fold(draws, torch.tensor([stop]), AttentionParams(1.0), state=state)
        held, _ = pool.fold(held, arrivals(start, stop, heads, keys), fold)
        start = stop
        yield stop, held


def unevenness(counts: Tensor, samples: int, drawn: float) -> float:
    """Return how far inclusion counts are from equal, in standard deviations. More than 5 is no
    accident.

    This is Pearson's chi-square for samples without repetition, converted to a normal deviate by
    Wilson and Hilferty's cube root. The factor (n - 1) / n is there because samples have a fixed
    size.

    Args:
        counts: how many samples hold each of n tokens [n].
        samples: the number of samples.
        drawn: the number of tokens in each sample.
    """
    n = len(counts)
    p = drawn / n
    chi = ((counts - samples * p) ** 2).sum().item() / (samples * p * (1 - p)) * (n - 1) / n
    return z_of_chi_square(chi, n - 1)


def z_of_chi_square(chi: float, freedom: int) -> float:
    """Convert a chi-square to a normal deviate."""
    spread = 2 / (9 * freedom)
    return float(((chi / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def sums(kept: Slots, query: Tensor) -> Tensor:
    """Return the denominator of attention and then the numerator, by head [heads, 1 + value_dim],
    float64.
    """
    logits = kept.keys.double() @ query.double()
    above, below = (logits + kept.a).exp(), (logits + kept.b).exp()
    numerator = (above[..., None] * kept.values).nan_to_num(0.0).sum(dim=2)
    return torch.cat([below.sum(dim=2)[..., None], numerator], dim=-1)[0]


def bias(estimates: Tensor, exact: Tensor) -> float:
    """Return the largest distance of a mean of estimates [samples, k] from its exact sum [k], in
    standard errors. More than 5 is no accident.
    """
    deviation = estimates.std(dim=0) / math.sqrt(len(estimates))
    return float(((estimates.mean(dim=0) - exact).abs() / deviation).max())
