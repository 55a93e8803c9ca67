"""Where the slots of each pool lie in a row of the slab.

Quantized slots come first and have their places for ever, so many as there may be: first those of
the front, then those of the run, the rest is empty. Behind them lie the exact ones, the front, the
run and the tail, without a gap. Knows nothing about what is in a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from weir.policies import Pipe


@dataclass(frozen=True)
class Layout:
    """The slots of a row.

    Attributes:
        lengths: slots in use, by pool.
        order: the pools as they lie.
        starts: the first slot of each pool, by its place in the pipe.
        coded_front, coded: quantized slots in use, those of the front and all.
        first: the first exact slot.
        front: where the exact slots of the front end.
        used: where the run ends, and the tail begins.
    """

    lengths: tuple[int, ...]
    order: tuple[int, ...]
    starts: dict[int, int]
    coded_front: int
    coded: int
    first: int
    front: int
    used: int

    @property
    def run(self) -> int:
        """Tokens of the run, quantized and exact."""
        return self.coded - self.coded_front + self.used - self.front


def laid_out(pipe: Pipe, lengths: Sequence[int]) -> Layout:
    """The layout of a row whose pools have so many slots in use."""
    return _laid_out(pipe.front, pipe.run, pipe.coded, pipe.coded_slots, tuple(lengths))


@lru_cache(maxsize=256)
def _laid_out(
    in_front: tuple[int, ...],
    in_run: tuple[int, ...],
    coded: tuple[int, ...],
    first: int,
    lengths: tuple[int, ...],
) -> Layout:
    """The same, by the pools of the front, those of the run, those that are quantized, and the
    first exact slot. Once pools are full, all rows and folds have one.
    """
    exact = [pool for pool in (*in_front, *in_run) if pool not in coded]
    starts: dict[int, int] = {}
    ends = []
    for pools, at in ((coded, 0), (exact, first)):
        for pool in pools:
            starts[pool] = at
            at += lengths[pool]
        ends.append(at)
    coded_front = sum(lengths[pool] for pool in coded if pool in in_front)
    front = first + sum(lengths[pool] for pool in in_front if pool not in coded)
    return Layout(lengths, (*coded, *exact), starts, coded_front, ends[0], first, front, ends[1])


def used(pipe: Pipe, lengths: Sequence[int]) -> int:
    """`Layout.used` alone, which is asked for in every step."""
    total = sum(lengths)
    return pipe.coded_slots + total - sum(lengths[p] for p in pipe.coded) if pipe.coded else total
