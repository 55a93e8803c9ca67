"""Names with numbers that a stream is told, and asked for again much later.

They are nano's exercises, "Anna has 482.", which it has learned to look up. Knows nothing about
policies or pages.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from weir.stream import Stream
from weir.train import DIGITS, Words


@dataclass(frozen=True)
class Named:
    """Somebody's number.

    Attributes:
        name, number: as they are written.
        said: the ids that tell it.
        asked: the ids of the question, up to where the number begins.
        answer: the ids of the number.
    """

    name: str
    number: str
    said: tuple[int, ...]
    asked: tuple[int, ...]
    answer: tuple[int, ...]


def draw_names(tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 0) -> list[Named]:
    """Different names, each with a number of its own.

    Raises:
        WeirError: the tokenizer lacks names or digits that are one token.
    """
    words, rng = Words.of(tokenizer), np.random.default_rng(seed)
    drawn = []
    for name in rng.choice(words.names, size=count, replace=False):
        number = rng.choice(words.digits, size=DIGITS)
        drawn.append(
            Named(
                str(tokenizer.decode([int(name)])).strip(),
                str(tokenizer.decode(number.tolist())).replace(" ", ""),
                tuple(words.statement(name, number).tolist()),
                tuple(words.question(name).tolist()),
                tuple(number.tolist()),
            )
        )
    return drawn


def ask_names(
    stream: Stream, names: Sequence[Named], tokenizer: PreTrainedTokenizerBase
) -> list[str]:
    """What a stream answers to the question for each number, the likeliest digits.

    Each question is put to a copy, so that none knows of the others and the stream stays as it is.
    """
    answers = []
    for one in names:
        asked = copy.deepcopy(stream)
        asked.feed(one.asked)
        said = list(asked.generate(len(one.answer), stop=[]))
        answers.append(str(tokenizer.decode(said)).replace(" ", ""))
    return answers


def strip_of(stream: Stream, parts: int) -> list[float]:
    """How much of each part of what was read is still held, 0 to 1, in parts of one length.

    A token that holds a slot in every layer and KV head counts as 1, in half of them as 0.5.
    """
    holding = stream.holding()
    held = np.zeros(holding.seen)
    for token in holding.tokens():
        held[token.token] = token.pairs / holding.pairs
    return [round(float(part.mean()), 5) for part in np.array_split(held, parts)]
