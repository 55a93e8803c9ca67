"""How likely continuations are after contexts of different length, many in one batch.

Contexts are padded on the left and fed to one cache; what is asked for follows, padded on the right
where nothing reads it. So each row has what it would have alone. Knows nothing about text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.cache import StreamingCache
from weir.stream import MOST_LOGITS, PIECE, Stream


@dataclass(frozen=True)
class Likelihood:
    """What a model says of one continuation.

    Attributes:
        total: its log-likelihood given the context, in nats.
        greedy: whether the likeliest token came at every place.
    """

    total: float
    greedy: bool


def padded(rows: Sequence[Sequence[int]], pad: int, left: bool) -> tuple[Tensor, Tensor]:
    """Rows of ids as one tensor [batch, longest], and a mask that is 0 where they are padded."""
    longest = max(len(row) for row in rows)
    ids = torch.full((len(rows), longest), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(longest - len(row), None) if left else slice(0, len(row))
        ids[i, place] = torch.tensor(row, dtype=torch.int64)
        mask[i, place] = 1
    return ids, mask


@torch.no_grad()
def likelihoods(
    stream: Callable[[], Stream],
    contexts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    pad: int = 0,
) -> list[Likelihood]:
    """How likely each continuation is after its context, both of one token or more.

    Args:
        stream: makes a new stream under the policy; only its cache is used here. One under
            `recompute` has none, so that contexts of different length cannot be its rows.
        contexts, continuations: ids; the batch is all of them.
        pad: an id the model knows.
    """
    first = stream()
    if first.cache is None:
        pairs = zip(contexts, continuations, strict=True)
        return [_after(_row_feed(stream()), [context], [asked], pad)[0] for context, asked in pairs]
    return _after(_batch_feed(first.model, first.cache), contexts, continuations, pad)


Feed = Callable[[Tensor, Tensor, bool], Tensor]
"""Ids [batch, n] and the mask of everything so far to logits of all of them, or of the last."""


def _batch_feed(model: PreTrainedModel, cache: StreamingCache) -> Feed:
    def feed(ids: Tensor, mask: Tensor, every: bool) -> Tensor:
        # A prompt that is to be held whole comes in one forward; others in pieces, for memory.
        whole = cache.prefill == "full" and not cache.is_initialized
        seen = mask.shape[1] - ids.shape[1]
        parts: list[Tensor] = []
        for piece in ids.split(ids.shape[1] if whole else PIECE, dim=1):
            seen += piece.shape[1]
            logits = model(
                input_ids=piece.to(model.device),
                attention_mask=mask[:, :seen].to(model.device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=0 if every else 1,
            ).logits
            parts = [*parts, logits] if every else [logits]
        return torch.cat(parts, dim=1)

    return feed


def _row_feed(stream: Stream) -> Feed:
    def feed(ids: Tensor, mask: Tensor, every: bool) -> Tensor:
        logits = stream.feed(ids, all_logits=every)
        return logits if every else logits[:, None]

    return feed


def _after(
    feed: Feed, contexts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]], pad: int
) -> list[Likelihood]:
    ids, mask = padded(contexts, pad, left=True)
    logits = feed(ids, mask, False)[:, -1].float()
    asked, counts = padded(continuations, pad, left=False)
    total = torch.zeros(len(asked), dtype=torch.float64)
    greedy = torch.ones(len(asked), dtype=torch.bool)
    step = max(1, min(PIECE, MOST_LOGITS // (logits.shape[-1] * len(asked))))
    for start in range(0, asked.shape[1], step):
        piece, real = asked[:, start : start + step], counts[:, start : start + step].bool()
        before = logits[:, None]
        # Nothing is asked after the very last token, so it is not fed.
        fed = piece if start + step < asked.shape[1] else piece[:, :-1]
        if fed.shape[1]:
            # Padding on the right is fed as if it were text: nothing that counts comes after it.
            mask = torch.cat([mask, torch.ones_like(fed)], dim=1)
            after = feed(fed, mask, True).float()
            before = torch.cat([before, after], dim=1)[:, : piece.shape[1]]
            logits = after[:, -1]
        said = before.log_softmax(-1).gather(-1, piece.to(before.device)[..., None])[..., 0].cpu()
        total += torch.where(real, said.double(), 0.0).sum(1)
        greedy &= ((before.argmax(-1).cpu() == piece) | ~real).all(1)
    return [Likelihood(float(t), bool(g)) for t, g in zip(total, greedy, strict=True)]
