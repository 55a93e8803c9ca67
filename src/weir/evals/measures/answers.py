"""Answers to prompts: what a model writes after a text, up to where an answer ends.

Knows nothing about tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from weir.stream import AnswerText, Stream


@dataclass(frozen=True)
class Answer:
    """What a model wrote, and what that took.

    Attributes:
        text: without special tokens and without what it was stopped by.
        kv_bytes: bytes of the cache at the end.
        held: slots in use for one KV head at the end, on average over the layers; None where
            nothing is cached.
        seen: tokens of prompt and answer.
    """

    text: str
    kv_bytes: int
    held: float | None
    seen: int


def answer(
    stream: Stream,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    most: int,
    stops: Sequence[str] = (),
    **sampling: Any,
) -> Answer:
    """What the model writes after a prompt; the likeliest tokens unless `sampling` says otherwise.

    Args:
        stream: where the prompt goes on from.
        tokenizer: of the stream's model.
        prompt: ids.
        most: tokens of the answer.
        stops: texts that end it.
        sampling: temperature, top_k, top_p, as for `Stream.generate`.
    """
    stream.feed(prompt)
    tokens: list[int] = []
    growing = AnswerText(tokenizer, stops)
    for token in stream.generate(most, **sampling):
        tokens.append(token)
        growing.add(token)
        if growing.stopped:
            break
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    return Answer(cut(text, stops), stream.nbytes, _held(stream), stream.seen)


def _held(stream: Stream) -> float | None:
    layers = stream.report().get("layers")
    if layers is None:
        return None
    return sum(sum(layer["slots"].values()) for layer in layers) / len(layers)


def cut(text: str, stops: Sequence[str]) -> str:
    """A text up to the first of the stops in it; the empty stop is none."""
    for stop in stops:
        if stop:
            text = text.partition(stop)[0]
    return text
