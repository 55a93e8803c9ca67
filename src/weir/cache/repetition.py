"""KVzip: scores the tokens of a text while the model repeats it, and fills a cache with the best
tokens.

The model repeats the text on a copy of the row: the copy (`take_row`) is put into a separate cache,
the repetition is fed there, its attention is recorded, and the copy is dropped. The cache that the
row came from is only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache.cache import StreamingCache
from weir.cache.layer import Pending, fold_rows
from weir.cache.observing import AttentionCall, ListeningCache
from weir.cache.plan import Segment
from weir.pools import Marks, select_highest


@dataclass(frozen=True)
class Repetition:
    """A part of a text that the model is asked to repeat, and the tokens that it is fed for that.

    Attributes:
        start, stop: the first token of the part, counted from 0, and the one after its last.
        ids: the request and the part [length], int64.
    """

    start: int
    stop: int
    ids: Tensor


def repetition_scores(
    model: PreTrainedModel, full: StreamingCache, row: int, repetitions: Sequence[Repetition]
) -> dict[int, Tensor]:
    """Score the tokens of a row by the attention that they receive while they are repeated.

    While the model repeats the part of the text that contains a token, each query gives this token
    an attention weight. The score of the token is the largest of these weights, over all queries of
    the repetition and all query heads of a KV head (KVzip, section 3.2).

    Args:
        model: the model that the cache serves.
        full: a cache with the policy `dense`; it is not changed.
        row: the row.
        repetitions: the parts of the row's text.

    Returns:
        By layer [kv_heads, tokens], float32. Layers that keep their own sliding window, whatever
        the policy is, are left out.
    """
    state, found = full.take_row(row), dict[int, Tensor]()
    for layer, held in enumerate(full.stack):
        if held.spec.pipe.keeps_all:
            slab = held.state.slab
            assert slab is not None
            shape = slab.keys.shape[1], full.seen[row]
            found[layer] = torch.zeros(shape, device=slab.keys.device)
    part: Repetition

    def hear(call: AttentionCall) -> None:
        if call.layer in found:
            shares = call.attention().largest_shares(part.start, part.stop)
            found[call.layer][:, part.start : part.stop] = shares

    aside = ListeningCache(model, full.policy, hear, seed=full.seed, **full.made_with)
    try:
        for part in repetitions:
            aside.put_rows([state], check=False)
            aside.read(part.ids)
    finally:
        aside.close()
    return found


def fill(
    cache: StreamingCache, full: StreamingCache, row: int, scores: dict[int, Tensor], n: int
) -> None:
    """Fill a cache with the `n` tokens of a row that have the highest scores, separately for each
    KV head.

    Args:
        cache: an empty cache of one row, for the same model, with another policy whose first pool
            takes all tokens until it is full.
        full: a cache with the policy `dense`, which holds the row.
        row: the row in `full`.
        scores: from `repetition_scores`; layers without scores get the newest tokens, as many as
            their window has.
        n: number of tokens; if the row has fewer, all of them are taken.
    """
    rows = full.rows.select([row])
    (seen,), (waiting,) = rows.seen, rows.waiting
    for index, (layer, whole) in enumerate(zip(cache.stack, full.stack, strict=True)):
        held, slab = whole.state.slab, layer.state.slab
        assert held is not None
        assert slab is not None
        slots = held.view(row, row + 1).run(0, whole.state.used[row] + waiting)
        if index in scores:
            best = scores[index][None]
            stays = select_highest(min(n, seen), torch.ones_like(best, dtype=torch.bool), best)
            slots = slots.only(stays)
        else:
            slots = slots.part(max(0, len(slots) - (layer.spec.pipe.slots or 0)), len(slots))
        if slab.span is not None:  # text only: each token has the same place on all axes
            place = slots.position
            slots = replace(slots, span=torch.stack([place, torch.ones_like(place)], dim=-1))
        layer.params = whole.params
        count, device = len(slots), slots.keys.device
        columns = torch.zeros(1, count, dtype=torch.int64, device=device)
        before = [seen - count]
        segment = Segment(columns, [count], before, [0], [0], cache.origin, device, [Marks()])
        assert whole.params is not None
        fold_rows(layer.state, Pending(segment, whole.params, slots))
    cache.stack.rows = replace(rows, waiting=[0])
