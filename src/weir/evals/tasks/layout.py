"""Where what is said and what is asked stands in a stream, the same in all that are read together.

Knows nothing about words: a statement is so many tokens, and its question so many of its first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weir.errors import WeirError
from weir.stream import Stream

NEAREST = 16
PATIENCE = 200
"""CounterRNG of places after which they are drawn farther apart."""


@dataclass(frozen=True)
class Layout:
    """Where statements and answers stand, the same in every sample.

    Attributes:
        statements: for each question the places of the first tokens of what was said of it, the
            newest last.
        answers: the place of the first token of each answer, in order.
        length: tokens of the stream up to the end of the last answer and what stands behind it.
    """

    statements: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...]
    length: int


def distances_to(farthest: int, nearest: int = NEAREST) -> list[int]:
    """16, 32, 64 ... up to `farthest`, which is the last."""
    found = [nearest]
    while 2 * found[-1] <= farthest:
        found.append(2 * found[-1])
    return found if found[-1] == farthest else [*found, farthest]


def lay_out(
    distances: Sequence[int],
    before: int,
    rng: np.random.Generator,
    *,
    said: int,
    asks: Sequence[int],
    times: int = 1,
    front: int = 0,
) -> Layout:
    """Places such that each answer is due its distance after its number, and nothing overlaps.

    Args:
        distances: in tokens from what is asked for, where it was said last, to where the answer is
            due; the farthest last.
        before: tokens in front of the statement that stands farthest back.
        rng: draws the places.
        said: tokens of the longest statement.
        asks: for each question its tokens, with which its statements begin too.
        times: how often each is said. Earlier statements stand anywhere in front of the last.
        front: tokens at the beginning in whose place nothing is said.

    Raises:
        WeirError: there is no room for all that is to be said.
    """
    if distances[0] < said:
        raise WeirError(
            f"a statement of {said} tokens cannot be asked for after {distances[0]} tokens"
        )
    for tries in itertools.count():
        # Long statements at many distances need more room between them.
        widest = 48 * (1 + tries // PATIENCE)
        gaps = rng.integers(8, widest, size=len(distances))
        answers = before + distances[-1] + np.cumsum(gaps + said)
        last = answers - np.array(distances) - np.array(asks)
        begins = np.sort(np.concatenate([last, answers - np.array(asks)]))
        if (np.diff(begins) >= said).all():
            break
    length = int(answers[-1]) + said - asks[-1]
    free = np.ones(length, dtype=bool)
    free[:front] = False
    for begin in begins:
        free[begin : begin + said] = False
    statements = [[int(place)] for place in last]
    for places in statements:
        for _ in range(times - 1):
            places.insert(0, _room(free[: places[-1]], said, rng))
            free[places[0] : places[0] + said] = False
        places.sort()
    return Layout(tuple(map(tuple, statements)), tuple(answers.tolist()), length)


def _room(free: np.ndarray, size: int, rng: np.random.Generator) -> int:
    """A place where `size` tokens are free."""
    found = np.array([], dtype=np.int64)
    if len(free) >= size:
        windows = np.lib.stride_tricks.sliding_window_view(free, size)
        found = np.flatnonzero(windows.all(axis=1))
    if not len(found):
        raise WeirError("there is no room for all that is to be said: choose more tokens `before`")
    return int(rng.choice(found))


def answers_in_place(
    stream: Stream, ids: Tensor, places: Sequence[int], sizes: Sequence[int]
) -> Iterator[Tensor]:
    """Feed streams up to their last answer; yields what would be said at each [rows, size].

    The right answers stand in the streams, and are fed: greedy decoding gives all tokens of one
    exactly if each is the likeliest after the right ones before it.

    Args:
        stream: a new one.
        ids: [rows, length].
        places: where each answer begins, in order.
        sizes: tokens of each answer.
    """
    fed = 0
    for place, size in zip(places, sizes, strict=True):
        stream.feed(ids[:, fed : place - 1])
        fed = place - 1 + size
        logits = stream.feed(ids[:, place - 1 : fed], all_logits=True)
        yield torch.as_tensor(logits.argmax(-1).cpu())
