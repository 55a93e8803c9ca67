"""Reservoir sampling one token at a time, from the paper alone: the reference of `reservoir`.

"An Experiment of Implementing Reservoir Sampling to StreamingLLM", section 4: "each token, which
leaves the 'recent tokens' part and becomes a new member of the 'middle part', has a probability p
to evict and replace a random old sample, and a probability 1-p to evict itself. In the situation
that it replaces an old sample, each old sample has an equal probability q to be replaced", where

    p = sample_size / (total_num - start_size - recent_size)      (1)
    q = 1 / sample_size                                           (2)

and total_num is the "total number of tokens that have come in".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random


@dataclass
class Cache:
    """The cache of the paper's Figure 4: three lists of tokens, which are numbered as they come.

    Attributes:
        draw: returns a token's random number u in [0, 1), which serves both decisions: if u is
            below p, u / p is uniform as well and chooses the old sample.
    """

    start_size: int
    sample_size: int
    recent_size: int
    draw: Callable[[int], float]
    start: list[int] = field(default_factory=list)
    sample: list[int] = field(default_factory=list)
    recent: list[int] = field(default_factory=list)
    total_num: int = 0

    def add(self) -> None:
        """One more token comes in."""
        token = self.total_num
        self.total_num += 1
        if len(self.start) < self.start_size:
            self.start.append(token)
            return
        self.recent.append(token)
        if len(self.recent) > self.recent_size:
            self._enter_middle(self.recent.pop(0))

    def _enter_middle(self, token: int) -> None:
        if len(self.sample) < self.sample_size:
            self.sample.append(token)
            return
        p = self.sample_size / (self.total_num - self.start_size - self.recent_size)
        u = self.draw(token)
        if u < p:
            self.sample[int(u / p * self.sample_size)] = token

    @property
    def log_weight(self) -> float:
        """The log-weight of a sample that makes sums over the middle unbiased: log(n_mid / s)."""
        middle = self.total_num - len(self.start) - len(self.recent)
        return math.log(max(1.0, middle / self.sample_size))


@dataclass
class Arrivals:
    """The same reservoir, for a pool that knows only its arrivals: p = s / (arrivals so far)."""

    sample_size: int
    draw: Callable[[int], float]
    sample: list[int] = field(default_factory=list)
    came: int = 0

    def add(self, token: int) -> int | None:
        """One token comes; returns the one that leaves."""
        self.came += 1
        if len(self.sample) < self.sample_size:
            self.sample.append(token)
            return None
        p = self.sample_size / self.came
        u = self.draw(token)
        if u >= p:
            return token
        place = int(u / p * self.sample_size)
        gone, self.sample[place] = self.sample[place], token
        return gone


def figure_2(sample_size: int, tokens: int, random: Random) -> list[list[int]]:
    """The tokens of the middle that the code of Figure 2 has kept after each of them: if there is
    one too many, it "will randomly select" `sample_size` of those that are still there.
    """
    sample: list[int] = []
    steps = []
    for token in range(tokens):
        sample = [*sample, token]
        if len(sample) > sample_size:
            sample = random.sample(sample, sample_size)
        steps.append(sample)
    return steps
