"""Where the slots of each pool lie in a row of the slab.

Quantised slots come first and have their places for ever, so many as there may be: first those of
the front, then those of the run, the rest is empty. Behind them lie the exact ones, the front, the
run and the tail, without a gap. Knows nothing about what is in a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weir.policies import Pipe


@dataclass(frozen=True)
class Layout:
    """The slots of a row.

    Attributes:
        lengths: slots in use, by pool.
        order: the pools as they lie.
        starts: the first slot of each pool, by its place in the pipe.
        coded_front, coded: quantised slots in use, those of the front and all.
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
        """Tokens of the run, quantised and exact."""
        return self.coded - self.coded_front + self.used - self.front


def laid_out(pipe: Pipe, lengths: Sequence[int]) -> Layout:
    """The layout of a row whose pools have so many slots in use."""
    first = pipe.coded_slots
    exact = [pool for pool in (*pipe.front, *pipe.run) if pool not in pipe.coded]
    starts: dict[int, int] = {}
    ends = []
    for pools, at in ((pipe.coded, 0), (exact, first)):
        for pool in pools:
            starts[pool] = at
            at += lengths[pool]
        ends.append(at)
    in_front = [pool for pool in pipe.front if pool not in pipe.coded]
    coded_front = sum(lengths[pool] for pool in pipe.coded if pool in pipe.front)
    front = first + sum(lengths[pool] for pool in in_front)
    order = (*pipe.coded, *exact)
    return Layout(tuple(lengths), order, starts, coded_front, ends[0], first, front, ends[1])


def used(pipe: Pipe, lengths: Sequence[int]) -> int:
    """`Layout.used` alone, which is asked for in every step."""
    total = sum(lengths)
    return pipe.coded_slots + total - sum(lengths[p] for p in pipe.coded) if pipe.coded else total
