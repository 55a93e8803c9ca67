"""Measure a trained model: streaming loss by cache configuration, abilities, attention shares.

Every model is measured on the same tokens of text. Tokens that its tokenizer puts in front of a
text are added (the arguments `front`) and never scored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from weir.evals.inspect import Attention, watch
from weir.evals.scores import count_right
from weir.stream import MOST_LOGITS, Stream

BLOCK = 500
"""Tokens in a block. Confidence intervals are computed over the mean losses of blocks."""
STEP = 250
CHOICES = 4
ROWS = 32


def policy_of_config(sinks: int, budget: int) -> str:
    """The policy of `sinks` initial tokens and `budget` slots in all."""
    if sinks == 0:
        return f"window(budget={budget})"
    return f"streaming_llm(budget={budget}, sinks={sinks})"


def stream_losses(
    model: PreTrainedModel,
    front: list[int],
    text: Tensor,
    policy: str,
    chunk: int,
) -> list[float]:
    """The mean loss of each `BLOCK` tokens of a text that is streamed once; nats a token.

    Args:
        model: the model.
        front: ids in front of the text.
        text: ids [tokens]. The first is not scored, because some models have nothing before it.
        policy: the cache's policy.
        chunk: tokens between two folds.
    """
    stream = Stream(model, policy, chunk=chunk)
    if front:
        stream.feed(torch.tensor(front))
    losses: list[Tensor] = []
    for piece in text.split(STEP):
        losses.append(stream.score(piece[None])[0].double().cpu())
    scored = torch.cat(losses)[1:]
    return [float(block.mean()) for block in scored.split(BLOCK) if len(block) == BLOCK]


def _rows_at_once(model: PreTrainedModel, length: int) -> int:
    """Rows of a length in one batch, bounded by `ROWS` and by the size of the logits."""
    return max(1, min(ROWS, MOST_LOGITS // (length * int(model.config.vocab_size))))


@torch.no_grad()
def _losses(model: PreTrainedModel, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each next token, and whether it was the likeliest; both [rows, length - 1]."""
    losses, hits = [], []
    for some in rows.split(_rows_at_once(model, rows.shape[1])):
        logits = model(input_ids=some.to(model.device), use_cache=False).logits[:, :-1].float()
        right = some[:, 1:].to(model.device)
        losses.append(-logits.log_softmax(-1).gather(-1, right[..., None])[..., 0].cpu())
        hits.append((logits.argmax(-1) == right).cpu())
    return torch.cat(losses), torch.cat(hits)


def _with_front(front: list[int], rows: np.ndarray) -> Tensor:
    ids = torch.from_numpy(np.ascontiguousarray(rows).astype(np.int64))
    return torch.cat([torch.tensor(front, dtype=torch.int64).expand(len(ids), -1), ids], dim=1)


def _passages(text: np.ndarray, length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Passages of a text from random places [count, length]."""
    places = rng.integers(0, len(text) - length, size=count)
    return np.stack([text[place : place + length] for place in places])


def inside_window(
    model: PreTrainedModel, front: list[int], text: np.ndarray, length: int, samples: int
) -> list[float]:
    """Mean loss of each of some held-out samples of the window's length; nats a token."""
    rows = _passages(text, length, samples, np.random.default_rng(11))
    losses, _ = _losses(model, _with_front(front, rows))
    return losses[:, len(front) :].double().mean(1).tolist()


def continuation(
    model: PreTrainedModel, front: list[int], text: np.ndarray, length: int, questions: int
) -> dict[str, Any]:
    """How often the right continuation of a passage is the likeliest of four, as in HellaSwag.

    The context is three quarters of a window. The choices are the true last quarter and three
    passages from elsewhere in the text. Guessing gives 25 %.
    """
    rng = np.random.default_rng(12)
    context = 3 * length // 4
    rows = _passages(text, length, questions, rng)
    totals = []
    for choice in range(CHOICES):
        asked = rows.copy()
        if choice:
            asked[:, context:] = _passages(text, length - context, questions, rng)
        losses, _ = _losses(model, _with_front(front, asked))
        totals.append(losses[:, len(front) + context - 1 :].sum(1))
    right = totals[0] < torch.stack(totals[1:]).amin(0)
    return count_right(int(right.sum()), questions)


def last_word(
    model: PreTrainedModel, front: list[int], text: np.ndarray, length: int, questions: int
) -> dict[str, Any]:
    """How often the likeliest token at the end of a window is the right one, as in LAMBADA."""
    rows = _passages(text, length, questions, np.random.default_rng(13))
    _, hits = _losses(model, _with_front(front, rows))
    return count_right(int(hits[:, -1].sum()), questions)


def recall(
    model: PreTrainedModel, front: list[int], text: np.ndarray, length: int, questions: int
) -> dict[str, Any]:
    """How many tokens of a passage are predicted when it comes a second time in the window.

    A quarter of the window, half a window of other text, and the same quarter again.
    """
    rng = np.random.default_rng(14)
    part = length // 4
    rows = _passages(text, length, questions, rng)
    rows[:, -part:] = rows[:, :part]
    _, hits = _losses(model, _with_front(front, rows))
    again, first = hits[:, -part + 1 :], hits[:, len(front) : len(front) + part - 1]
    return {
        **count_right(int(again.sum()), again.numel()),
        "first_time": float(first.double().mean()),
    }


ABILITIES: dict[str, Callable[..., dict[str, Any]]] = {
    "continuation": continuation,
    "last_word": last_word,
    "recall": recall,
}


def attention_shares(
    model: PreTrainedModel, front: list[int], text: np.ndarray, length: int, samples: int
) -> list[dict[str, float]]:
    """Shares of attention on the first tokens, averaged over heads and the window's later queries.

    Returns:
        For each layer "first" (the first token of the stream), "first_4", "nowhere" (what a Zero
        Sink takes), and "even" (what the first token would get if all tokens got the same).
    """
    rows = _with_front(front, _passages(text, length, samples, np.random.default_rng(15)))
    late = rows.shape[1] // 2
    sums: dict[int, Tensor] = {}
    counts: dict[int, int] = {}

    def look(attention: Attention) -> None:
        for start, stop in attention.blocks():
            places = torch.arange(start, stop) + attention.first
            weights = attention.weights(start, stop)[:, :, places >= late]
            total = weights.sum(-1)
            told = torch.stack([weights[..., 0], weights[..., :4].sum(-1), 1 - total])
            even = (1.0 / (places[places >= late] + 1)).expand_as(total)
            told = torch.cat([told, even[None].to(told)]).double().flatten(1)
            layer = attention.layer
            sums[layer] = sums.get(layer, torch.zeros(4, dtype=torch.float64)) + told.sum(1).cpu()
            counts[layer] = counts.get(layer, 0) + told.shape[1]

    for some in rows.split(ROWS):
        watch(model, some, look)
    names = ("first", "first_4", "nowhere", "even")
    return [
        dict(zip(names, (sums[layer] / counts[layer]).tolist(), strict=True))
        for layer in sorted(sums)
    ]
