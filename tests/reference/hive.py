"""BUZZ's beehive one token at a time, from the paper alone: what `hive` is checked against.

Zhao et al. 2024, "BUZZ: Beehive-structured Sparse KV Cache with Segmented Heavy Hitters", section
3.3: Algorithm 1 (when tokens are evicted), Algorithm 2 (`local_max_sample`), interval sampling
("select items every ŝ intervals"), Remark 2 (a prompt), and the two ablations of section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def local_max_sample(stride: int, tokens: list[Any]) -> list[Any]:
    """Algorithm 2."""
    res, idx = [], 0
    while idx < len(tokens):
        segment = tokens[idx : idx + stride]
        m = segment[0]
        for token in segment:
            if token.mass > m.mass:
                m = token
        res.append(m)
        idx += stride
    return res


def interval_sample(stride: int, tokens: list[Any]) -> list[Any]:
    """Every `stride`-th token, beginning with the first."""
    return [token for place, token in enumerate(tokens) if place % stride == 0]


class Beehive:
    """The middle of one head's cache.

    Attributes:
        old: survivors of evictions.
        new: tokens that arrived since the last eviction.
        settled: the place of the newest token that was there at an eviction.
        after: how many tokens each eviction left.
    """

    def __init__(
        self, threshold: int, stride: int, swapped: bool = False, local_max: bool = True
    ) -> None:
        self.threshold, self.stride, self.small = threshold, stride, (stride + 1) // 2
        if swapped:
            self.stride, self.small = self.small, self.stride
        self.local_max = local_max
        self.old: list[Any] = []
        self.new: list[Any] = []
        self.settled = -1
        self.after: list[int] = []

    def take(self, token: Any) -> None:
        """One token leaves the window (the loop of Algorithm 1)."""
        self.new.append(token)
        if len(self.old) + len(self.new) > self.threshold:
            self.evict()

    def take_prompt(self, tokens: list[Any]) -> None:
        """Remark 2: sampling is repeated until what is left fits."""
        self.new += tokens
        while len(self.old) + len(self.new) > self.threshold:
            self.evict()

    def take_unordered(self, tokens: list[Any]) -> None:
        """Not in the paper: tokens from before the last eviction are old, the others new."""
        tokens = sorted([*self.new, *tokens], key=lambda t: t.position)
        late = [token for token in tokens if token.position <= self.settled]
        self.old, self.new = sorted(self.old + late, key=lambda t: t.position), []
        while len(self.old) > self.threshold:
            self.evict()
        for token in tokens:
            if token not in late:
                self.take(token)

    def evict(self) -> None:
        """Lines 13 to 15 of Algorithm 1."""
        sample = local_max_sample if self.local_max else interval_sample
        decided = [token.position for token in self.old + self.new]
        self.old = interval_sample(self.small, self.old) + sample(self.stride, self.new)
        self.new = []
        self.settled = max(self.settled, *decided)
        self.after.append(len(self.old))


def hive_of(*parameters: Any, prompt: int = 0) -> Callable[..., tuple[list[Any], list[Any]]]:
    """A fold (mine, new, at) -> (mine, gone); `at` has the layer and the head.

    Args:
        parameters: those of `Beehive`.
        prompt: length of a prompt that is folded at once; 0 for none.
    """
    hives: dict[Any, Beehive] = {}

    def fold(mine: list[Any], new: list[Any], at: Any) -> tuple[list[Any], list[Any]]:
        hive = hives.setdefault((at.layer, at.head), Beehive(*parameters))
        before = hive.old + hive.new
        newest = max((token.position for token in before), default=-1)
        assert sorted(t.position for t in mine) == sorted(t.position for t in before)
        if prompt and at.seen == prompt:
            hive.take_prompt(new)
        elif all(token.position > newest for token in new):
            for token in sorted(new, key=lambda t: t.position):
                hive.take(token)
        else:
            hive.take_unordered(new)
        stay = hive.old + hive.new
        return stay, [t for t in before + new if all(t is not other for other in stay)]

    fold.hives = hives  # type: ignore[attr-defined]
    return fold
