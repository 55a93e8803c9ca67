"""Which places of a stream its cache still holds, for searches in the text that has left it."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np

from weir.cache import Holding
from weir.policies import Policy, Recompute
from weir.stream.transcript import find_held, number_slots

HELD = 0.5
"""Share of layers and KV heads, on average over the tokens of a text, from which on it counts as
held: then it is not brought back."""


class HoldsTokens(Protocol):
    """A stream: what it has seen, under which policy, and what its cache holds."""

    @property
    def policy(self) -> Policy:
        """The policy of its cache."""

    @property
    def seen(self) -> int:
        """Tokens of the stream so far."""

    def holding(self) -> Holding:
        """The tokens that its cache holds."""


class HeldPlaces:
    """The places of a stream that are held, found when the first is asked for."""

    def __init__(self, stream: HoldsTokens) -> None:
        self._stream = stream

    def __call__(self, start: int, stop: int) -> bool:
        """Whether the cache holds the text at the positions `start` to `stop`."""
        stop = min(stop, self._stream.seen)
        if not 0 <= start < stop:
            return False
        stream = self._stream
        if isinstance(stream.policy, Recompute):
            first = max(0, stream.seen - stream.policy.budget)
            return stop - max(start, first) >= HELD * (stop - start)
        slots, pairs, places = self._slots
        inside = slots[(slots >= start * places) & (slots < stop * places)]
        least = HELD * (stop - start) * pairs
        # A token may hold several slots of one pair of a layer and KV head, which count as one.
        return len(inside) >= least and len(np.unique(inside)) >= least

    @cached_property
    def _slots(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int, int]:
        """The tokens of all slots with their pairs, as `number_slots` has them, and how many pairs
        there are.
        """
        holding = self._stream.holding()
        slots, places = number_slots(holding)
        return slots, holding.pairs, places


def held_ranges(holding: Holding) -> bytes:
    """The places that count as held, as pairs of a first place and the one after the last, four
    bytes each.
    """
    tokens, shares = find_held(holding)
    held = tokens[shares >= HELD]
    breaks = np.flatnonzero(np.diff(held) > 1)
    first = np.concatenate([held[:1], held[breaks + 1]])
    last = np.concatenate([held[breaks], held[-1:]])
    return np.stack([first, last + 1], axis=1).astype("<u4").tobytes()


class HeldRanges:
    """The places that `held_ranges` has written, in a stream that has `seen` so many tokens since.

    Tokens after the last that was known then are held.
    """

    def __init__(self, ranges: bytes, known: int) -> None:
        self._edges = np.frombuffer(ranges, "<u4").astype(np.int64)
        self._known = known

    def __call__(self, start: int, stop: int) -> bool:
        """Whether half of the positions `start` to `stop` are held."""
        if not 0 <= start < stop:
            return False
        return self._count(stop) - self._count(start) >= HELD * (stop - start)

    def _count(self, end: int) -> int:
        """How many places before `end` are held."""
        edges = np.minimum(self._edges, end)
        return int((edges[1::2] - edges[::2]).sum()) + max(0, end - self._known)
