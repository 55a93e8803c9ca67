"""What a query reads of a cache whose positions are counted inside it, one token at a time.

Xiao et al. 2024 (StreamingLLM), section 3.2: the tokens of the cache stand side by side, the newest
at its place in the stream. Plain numbers in double precision, rotated by complex numbers.
"""

from __future__ import annotations

import cmath
import math

import torch

from weir.slab import AttentionParams, LayerPositions


def frame_of(there: list[int], after: int) -> dict[int, int]:
    """Where each token is read, by its place in the stream.

    Args:
        there: the places of all tokens that are held, rising.
        after: the place of the next token of the stream.
    """
    return {place: after - len(there) + rank for rank, place in enumerate(there)}


def query_place(there: list[int], frame: dict[int, int], place: int) -> int:
    """Where a query stands: where its token does, or, if it is gone, the next older one."""
    older = [frame[p] for p in there if p <= place]
    return older[-1] if older else frame[there[0]] - 1


def rotated(x: list[float], place: int, positions: LayerPositions) -> list[float]:
    """A query or key at a place: its pairs (i, i + half) turned."""
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
    """(the share of each token, by its place in the stream; the logarithm of their sum).

    Args:
        query: without its rotation.
        keys: without theirs, by place.
        frame: where each is read.
        asked: the query's place in the stream; it sees nothing newer.
        place: where it stands in the frame.
        positions, form: of the layer.
        head: which query head.
        newest: the place from which ALiBi counts, where nothing is rounded.
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
