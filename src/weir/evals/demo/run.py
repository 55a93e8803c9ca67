"""Reads the packaged book under several policies at once, a step of each in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir.evals.measures import STEP, PerplexityMeter
from weir.stream import BOOK, Stream, encode, read_text

TITLE = "War and Peace"
POLICIES = (
    "dense",
    "window(budget=256)",
    "streaming_llm(budget=256)",
    "streaming_llm(budget=448)",
)
"""What everyone does, what fails, what the paper does, and the same with all the window allows."""


def book(tokenizer: PreTrainedTokenizerBase, tokens: int) -> Tensor:
    """The first tokens of the packaged book; fewer if it has no more."""
    return encode(tokenizer, read_text(BOOK), tokens)


def read_book(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    policies: tuple[str, ...] = POLICIES,
    block: int = 500,
    on_step: Callable[[list[PerplexityMeter]], bool | None] = lambda meters: None,
) -> dict[str, Any]:
    """Read the tokens `ids` of the book under every policy.

    Args:
        model: the model.
        ids: what `book` returned.
        policies: the policies.
        block: tokens in a block of `ppl_by_block`.
        on_step: called after every `STEP` tokens; reading ends early when it returns True.

    Returns:
        {"model_window", "book", "tokens", "block", "policies": [figures of each]}; the figures are
        those of `weir stream`, and "slots" (None for no limit).
    """
    meters = [PerplexityMeter(Stream(model, policy), block) for policy in policies]
    for piece in ids.split(STEP):
        for meter in meters:
            meter.take(piece)
        if on_step(meters):
            break
    for meter in meters:
        meter.close()
    return {
        "model_window": model.config.max_position_embeddings,
        "book": f"Leo Tolstoy, {TITLE}",
        "tokens": meters[0].reading.tokens,
        "block": block,
        "policies": [
            {**meter.reading.as_json(), "slots": meter.stream.capacity} for meter in meters
        ],
    }
