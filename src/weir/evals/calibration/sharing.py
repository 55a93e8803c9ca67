"""Bytes shared out between layers: to where each buys the most.

Greedy marginal allocation. Knows what a choice takes and what it costs in error, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """One size that a layer may have.

    Attributes:
        nbytes: what it takes.
        error: what it leaves wrong.
    """

    nbytes: int
    error: float


def share_out(layers: Sequence[Sequence[Choice]], total: int) -> list[int]:
    """Which of its choices each layer takes.

    Every layer begins with the cheapest. Then, again and again, one layer takes the step that takes
    away the most error for each byte more, of all steps of all layers that still fit. A step may
    pass over choices, so that one that buys nothing does not hide a better one behind it. Where
    each further byte buys a layer less than the one before, no other way to spend as many bytes
    leaves less error.

    Args:
        layers: of each layer its choices.
        total: bytes that all of them together may take.

    Returns:
        For each layer the place of its choice. Where even the cheapest do not fit, these.
    """
    taken = [
        min(range(len(choices)), key=lambda n: (choices[n].nbytes, choices[n].error))
        for choices in layers
    ]
    left = total - sum(choices[n].nbytes for choices, n in zip(layers, taken, strict=True))
    while (step := _best_step(layers, taken, left)) is not None:
        layer, choice = step
        left -= layers[layer][choice].nbytes - layers[layer][taken[layer]].nbytes
        taken[layer] = choice
    return taken


def _best_step(
    layers: Sequence[Sequence[Choice]], taken: Sequence[int], left: int
) -> tuple[int, int] | None:
    """The layer and the choice that take away the most error for a byte; None if none fits."""
    best, found = 0.0, None
    for layer, choices in enumerate(layers):
        now = choices[taken[layer]]
        for place, choice in enumerate(choices):
            more, less = choice.nbytes - now.nbytes, now.error - choice.error
            # Nothing is worth more than what costs nothing.
            gain = less / more if more > 0 else math.inf
            if less > 0 and more <= left and gain > best:
                best, found = gain, (layer, place)
    return found
