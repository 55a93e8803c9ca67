"""SnapKV with plain lists, from the paper alone: what `snap` is checked against.

Li et al. 2024, "SnapKV: LLM Knows What You Are Looking for Before Generation", section 4 and
Listing 1: the attention of the queries in the observation window is summed over the window and
pooled over neighbors. The tokens before the window with the highest sums are kept, and the window.
Each fold is treated as the end of a prompt that consists of the tokens still held.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

Logit = Callable[[Any, int, Any, Any], list[float]]
Sinks = Callable[[Any], list[float]]


def softmax(logits: list[float], sink: float = -math.inf) -> list[float]:
    """The softmax of logits, with the model's sink in the denominator."""
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    total = math.fsum([*powers, math.exp(sink - top)])
    return [p / total for p in powers]


def votes_of(
    tokens: list[Any],
    window: int,
    logits_of: Logit,
    at: Any,
    sinks_of: Sinks | None = None,
    read: bool = False,
) -> dict[int, float]:
    """The votes for each token before the window, by its place in the stream.

    With `read`, tokens have consecutive positions, and the newest has its place in the stream.
    `said` remembers the place of each.
    """
    moved = {t.position: copy.copy(t) for t in tokens}
    for rank, place in enumerate(sorted(moved)):
        moved[place].position = at.seen - len(moved) + rank if read else place
        moved[place].said = place
    votes: dict[int, list[float]] = {t.position: [] for t in tokens}
    for place in range(max(0, at.seen - window), at.seen):
        seen = [t for t in tokens if t.position <= place]
        if not seen:
            continue
        by_token = [logits_of(at, place, moved[t.position], at.queries[place]) for t in seen]
        heads = list(zip(*by_token, strict=True))
        sinks = [-math.inf] * len(heads) if sinks_of is None else sinks_of(at)
        for of_head, sink in zip(heads, sinks, strict=True):
            for token, share in zip(seen, softmax(list(of_head), sink), strict=True):
                votes[token.position].append(share)
    return {p: math.fsum(v) for p, v in votes.items() if p < at.seen - window}


def pooled_at(place: int, votes: dict[int, float], kernel: int, average: bool) -> float:
    """Pool the votes around a place. A place whose token was evicted has none."""
    near = [votes.get(place + step, 0.0) for step in range(-(kernel // 2), kernel // 2 + 1)]
    return math.fsum(near) / kernel if average else max(near)


def snap_of(
    budget: int,
    window: int,
    kernel: int,
    average: bool = False,
    *,
    logits_of: Logit,
    sinks_of: Sinks | None = None,
    others_of: Callable[[Any], list[Any]] | None = None,
) -> Callable[..., tuple[list[Any], list[Any]]]:
    """A fold (mine, new, at) -> (mine, gone).

    Args:
        budget, window, kernel, average: as in the pool.
        logits_of: (at, place of the query, token, queries) -> a logit for each head of the group.
        sinks_of: at -> the sink logit of each head of the group; None if the model has none.
        others_of: at -> the tokens that other pools hold. Votes are then the attention over these
            and the pool's tokens, at the positions at which attention reads keys. If None, votes
            are the attention over this pool's tokens alone, at places in the stream.
    """

    def scores(tokens: list[Any], at: Any) -> dict[int, tuple[float, float]]:
        others = [] if others_of is None else others_of(at)
        everyone, read = [*tokens, *others], others_of is not None
        votes = votes_of(everyone, window, logits_of, at, sinks_of, read)
        votes = {t.position: votes[t.position] for t in tokens if t.position in votes}
        return {
            t.position: (pooled_at(t.position, votes, kernel, average), votes[t.position])
            if t.position in votes
            else (math.inf, 0.0)
            for t in tokens
        }

    def fold(mine: list[Any], new: list[Any], at: Any) -> tuple[list[Any], list[Any]]:
        tokens = sorted([*mine, *new], key=lambda t: t.position)
        if len(tokens) <= budget:
            return tokens, []
        score = scores(tokens, at)
        best = sorted(tokens, key=lambda t: (*(-x for x in score[t.position]), t.position))
        kept = {t.position for t in best[:budget]}
        gone = [t for t in tokens if t.position not in kept]
        return [t for t in tokens if t.position in kept], gone

    fold.scores = scores  # type: ignore[attr-defined]
    return fold
