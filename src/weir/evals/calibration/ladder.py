"""Other sizes of a pipe, and other splits between its newest tokens and the rest.

Knows pools by their number of slots alone, and nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator

from weir.errors import WeirError
from weir.policies import Pipe, share_slots

EIGHTHS = (*range(2, 17), *range(18, 33, 2))
"""The sizes that are tried, in eighths of the slots that can be shared out: 1/4 to 4."""
NEWEST = (1 / 4, 1 / 2, 3 / 4, 7 / 8)
"""The shares of the newest tokens that are tried beside that of the pipe."""


def ladder(pipe: Pipe, most: int, *, splits: bool = False) -> list[Pipe]:
    """A pipe in the sizes that are tried, the smallest first; its own among them.

    First tokens, what a row is told to keep and what a pool says is fixed stay as they are. Pools
    keep their shares of the rest.

    Args:
        pipe: one with a limit.
        most: no size has more slots, unless the pipe has them itself.
        splits: whether the share of the newest tokens is tried in several sizes too; only a pipe
            that holds newest tokens and others has one.
    """
    assert pipe.slots is not None
    free = _free(pipe)
    total, newest = sum(free), sum(free[place] for place in pipe.run)
    shares: list[float | None] = [None]
    if splits and 0 < newest < total:
        shares += NEWEST
    found = {pipe.stands_for: pipe}
    for eighths in EIGHTHS if total else ():
        slots = round(total * eighths / 8)
        if pipe.slots - total + slots <= most:
            for sized in _sized(pipe, free, slots, shares):
                found.setdefault(sized.stands_for, sized)
    return sorted(found.values(), key=lambda sized: sized.slots or 0)


def _free(pipe: Pipe) -> list[int]:
    """Of each pool, the slots that may become more or fewer."""
    return [
        0
        if pool.needs_marks or (pool.in_order and not pool.keeps_run)
        else (pool.slots() or 0) - pool.fixed(pipe.pools[:place])
        for place, pool in enumerate(pipe.pools)
    ]


def _sized(pipe: Pipe, free: list[int], slots: int, shares: list[float | None]) -> Iterator[Pipe]:
    """The pipe with so many slots to share out, with each of the shares of the newest tokens."""
    for share in shares:
        if share is None:
            parts = [(free, slots)]
        else:
            first = [n if place in pipe.run else 0 for place, n in enumerate(free)]
            rest = [n - own for n, own in zip(free, first, strict=True)]
            newest = round(slots * share)
            parts = [(first, newest), (rest, slots - newest)]
        if any(n < sum(size > 0 for size in sizes) for sizes, n in parts):
            continue  # a pool would be left without a slot
        given = [sum(each) for each in zip(*(share_slots(n, s) for s, n in parts), strict=True)]
        try:
            pools = tuple(
                pool if n == now else pool.resized((pool.slots() or 0) + now - n)
                for pool, n, now in zip(pipe.pools, free, given, strict=True)
            )
            yield Pipe(pools, formats=pipe.formats)
        except WeirError:
            continue  # some pools come in some sizes only
