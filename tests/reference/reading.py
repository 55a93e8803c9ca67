"""The attention of a query over a cache that counts positions within itself, one token at a time.

Xiao et al. 2024 (StreamingLLM), section 3.2: the tokens of the cache have consecutive positions,
and the newest has its place in the stream. Plain numbers in double precision, rotated by complex
numbers.
"""

from __future__ import annotations

import cmath
import math

import torch

from weir.slab import AttentionParams, LayerPositions


def frame_of(there: list[int], after: int) -> dict[int, int]:
    """The position at which each token is read, by its place in the stream.

    Args:
        there: the places of all tokens that are held, in order.
        after: the place of the next token of the stream.
    """
    return {place: after - len(there) + rank for rank, place in enumerate(there)}


def query_place(there: list[int], frame: dict[int, int], place: int) -> int:
    """The position of a query: that of its token or, if it was evicted, of the next older one."""
    older = [frame[p] for p in there if p <= place]
    return older[-1] if older else frame[there[0]] - 1


def rotated(x: list[float], place: int, positions: LayerPositions) -> list[float]:
    """Rotate a query or key to a place, in pairs of dimensions (i, i + half)."""
    if positions.rotary is None:
        return x
    turns = positions.rotary.frequencies.tolist()
    half, out = len(turns), list(x)
    for i, radians in enumerate(turns):
        z = complex(x[i], x[i + half]) * cmath.exp(1j * radians * place) * positions.rotary.scaling
        out[i], out[i + half] = z.real, z.imag
    return out


def share_of(
    query: list[float],
    keys: dict[int, list[float]],
    frame: dict[int, int],
    asked: int,
    place: int,
    positions: LayerPositions,
    form: AttentionParams,
    head: int,
    newest: int,
) -> tuple[dict[int, float], float]:
    """(the share of each token, by its place in the stream; the log of the softmax's denominator).

    Args:
        query: the query without rotation.
        keys: the keys without rotation, by place in the stream.
        frame: the position at which each key is read, by place in the stream.
        asked: the query's place in the stream; it attends to nothing newer.
        place: the query's position in the frame.
        positions, form: those of the layer.
        head: which query head.
        newest: the position from which ALiBi counts if the model does not round its biases.
    """
    q = rotated(query, place, positions)
    logits = {}
    for p, key in keys.items():
        if p > asked:
            continue
        k = rotated(key, frame[p], positions)
        logit = sum(a * b for a, b in zip(q, k, strict=True)) * form.scale
        if form.softcap is not None:
            logit = math.tanh(logit / form.softcap) * form.softcap
        alibi = positions.alibi
        if alibi is not None and alibi.rounding is None:
            logit += float(alibi.slopes[head]) * (frame[p] - newest)
        elif alibi is not None:
            first = min(frame.values())
            slope = alibi.slopes[head].to(alibi.rounding)
            product = slope * torch.tensor(frame[p] - first).to(alibi.rounding)
            logit += float(product) * alibi.factor
        logits[p] = logit
    total = math.fsum(math.exp(x) for x in logits.values())
    if form.sinks is not None:
        total += math.exp(float(form.sinks.flatten()[head]))
    return {p: math.exp(logits[p]) / total if p in logits else 0.0 for p in keys}, math.log(total)
