"""Priority sampling by the book: what `tail` is checked against.

Duffield, Lund and Thorup 2007, section 1: item i of weight w_i draws α_i and has the priority
q_i = w_i / α_i; the sample is the k items of highest priority, τ is the (k + 1)-st priority, and
each item of the sample counts for max(w_i, τ). This version has all tokens that ever arrived, so
that no error can build up in a stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NEXT_TO_NOTHING = 2.0**-126
"""The least weight, for tokens without a contribution."""


def weights(said: Sequence[float], floor: float) -> list[float]:
    """The weight of each token: its contribution, but at least `floor` times the mean so far."""
    total, found = 0.0, []
    for count, own in enumerate(said, start=1):
        total += own
        found.append(max(own, floor * total / count, NEXT_TO_NOTHING))
    return found


def sample(weigh: Mapping[int, float], n: int, draw: Mapping[int, float]) -> dict[int, float]:
    """The tokens that stay, and how many times each counts."""
    priority = {token: weight / draw[token] for token, weight in weigh.items()}
    order = sorted(weigh, key=priority.__getitem__, reverse=True)
    threshold = priority[order[n]] if len(order) > n else 0.0
    return {token: max(1.0, threshold / weigh[token]) for token in order[:n]}
