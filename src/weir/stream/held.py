"""Finds which places of a stream its cache still holds, for searches in the text that has left the
cache.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np

from weir.cache import Holding
from weir.policies import Policy, Recompute
from weir.stream.transcript import find_held, number_slots

HELD = 0.5
"""A text counts as held, and is not recalled, if at least this share of layers and KV heads holds
it, on average over its tokens.
"""


class HoldsTokens(Protocol):
    """A stream that can tell how many tokens it has seen, its policy, and which tokens its cache
    holds.
    """

    @property
    def policy(self) -> Policy:
        """The policy of its cache."""

    @property
    def seen(self) -> int:
        """Tokens of the stream so far."""

    def holding(self) -> Holding:
        """Return the tokens that its cache holds."""


class HeldPlaces:
    """The places of a stream that its cache holds. They are computed at the first call."""

    def __init__(self, stream: HoldsTokens) -> None:
        self._stream = stream

    def __call__(self, start: int, stop: int) -> bool:
        """Return whether the cache holds the text at the positions `start` to `stop`."""
        stop = min(stop, self._stream.seen)
        if not 0 <= start < stop:
            return False
        stream = self._stream
        if isinstance(stream.policy, Recompute):
            sinks = stream.policy.sinks
            newest = max(sinks, stream.seen - (stream.policy.budget - sinks))
            held = max(0, min(stop, sinks) - start) + max(0, stop - max(start, newest))
            return held >= HELD * (stop - start)
        slots, pairs, places = self._slots
        inside = slots[(slots >= start * places) & (slots < stop * places)]
        least = HELD * (stop - start) * pairs
        # A token can have several slots in one pair of a layer and KV head; they count as one.
        return len(inside) >= least and len(np.unique(inside)) >= least

    @cached_property
    def _slots(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int, int]:
        """Return the number that `number_slots` gives each slot, the number of pairs of a layer and
        KV head, and the factor by which `number_slots` multiplies tokens.
        """
        holding = self._stream.holding()
        slots, places = number_slots(holding)
        return slots, holding.pairs, places


def held_ranges(holding: Holding) -> bytes:
    """Return the places that count as held, as pairs of a first place and the one after the last,
    four bytes each.
    """
    tokens, shares = find_held(holding)
    held = tokens[shares >= HELD]
    breaks = np.flatnonzero(np.diff(held) > 1)
    first = np.concatenate([held[:1], held[breaks + 1]])
    last = np.concatenate([held[breaks], held[-1:]])
    return np.stack([first, last + 1], axis=1).astype("<u4").tobytes()


class HeldRanges:
    """Tells which texts are held, from ranges that `held_ranges` has written.

    Args:
        ranges: the bytes that `held_ranges` returned.
        known: number of tokens that the stream had seen when the ranges were written; later tokens
            count as held.
    """

    def __init__(self, ranges: bytes, known: int) -> None:
        self._edges = np.frombuffer(ranges, "<u4").astype(np.int64)
        self._known = known

    def __call__(self, start: int, stop: int) -> bool:
        """Return whether at least half of the positions `start` to `stop` are held."""
        if not 0 <= start < stop:
            return False
        return self._count(stop) - self._count(start) >= HELD * (stop - start)

    def _count(self, end: int) -> int:
        """Count the held places before `end`."""
        edges = np.minimum(self._edges, end)
        return int((edges[1::2] - edges[::2]).sum()) + max(0, end - self._known)
