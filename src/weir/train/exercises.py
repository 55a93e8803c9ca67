"""Training samples of the packaged model: books, shuffled segments, and names with numbers.

A sample is a row of token ids, which begins with the tokens that the tokenizer puts in front of
every text, and a weight for every token, which is 0 if predicting it teaches nothing. This module
knows nothing about models.

Text alone does not teach a small model to look things up. *Segments* are pieces of random tokens
that are repeated in shuffled order. They teach it to find an earlier passage by content and to copy
from there. *Recall* applies this to statements such as "Anna has 482." in book text: when "Anna
has" comes again, the model must predict the number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from weir.errors import WeirError

VERB = " has"
DIGITS = 3
PRACTICED = "weir_exercises"
"""Configuration entry that records whether a model was trained on exercises."""
NAMES = tuple(
    """Adam Alfred Alice Amelia Andrew Ann Anna Anne Arthur Ben Bernard Betty Bob Charles Charlotte
    Clara Daniel David Dick Edward Elizabeth Ellen Emily Emma Fanny Florence Frank Fred George
    Grace Harry Helen Henry Herbert Hugh Jack James Jane Jasper Jenny Jerry Jim Joe John Joseph
    Kate Laura Lewis Lily Lucy Margaret Maria Marian Martha Martin Mary Maurice Michael Nancy Nell
    Nelly Nicholas Nora Oliver Oswald Owen Patrick Paul Percy Peter Philip Rachel Ralph Richard
    Robert Roderick Roger Rose Sam Sarah Simon Stephen Susan Thomas Tom Walter Will
    William""".split()
)


def practiced(config: PreTrainedConfig) -> bool:
    """Return whether a configuration's model was trained on these exercises."""
    return getattr(config.get_text_config(decoder=True), PRACTICED, False) is True


@dataclass(frozen=True)
class Words:
    """The tokens that exercises are made of, found in a tokenizer's vocabulary.

    Attributes:
        front: the ids in front of every text: the start token, several, or none.
        names: ids of names.
        verb, space, stop: ids of " has", of a space and of a full stop.
        digits: ids of the digits 0 to 9, in order.
        plain: all ids except those of special tokens.
    """

    front: np.ndarray
    names: np.ndarray
    verb: int
    space: int
    stop: int
    digits: np.ndarray
    plain: np.ndarray

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Words:
        """Find the tokens; the names are those of `NAMES` that are one token with a leading
        space.
        """

        def ids_of(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        def one(text: str) -> int:
            ids = ids_of(text)
            if len(ids) != 1:
                raise WeirError(
                    f"the exercises need {text!r} to be one token, but in this tokenizer it is "
                    f"{len(ids)}. Train the tokenizer on more text or with a larger vocabulary."
                )
            return ids[0]

        names = [ids[0] for ids in (ids_of(f" {name}") for name in NAMES) if len(ids) == 1]
        if len(names) < 12:
            raise WeirError(
                "the exercises need at least 12 names that are one token, but this tokenizer has "
                f"only {len(names)}. Train it on more text or with a larger vocabulary."
            )
        special = set(tokenizer.all_special_ids)
        special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        return cls(
            front=front_of(tokenizer),
            names=np.array(names),
            verb=one(VERB),
            space=one(" "),
            stop=one("."),
            digits=np.array([one(str(digit)) for digit in range(10)]),
            plain=np.array(sorted(set(tokenizer.get_vocab().values()) - special)),
        )

    def statement(self, name: int, number: np.ndarray, verb: int | None = None) -> np.ndarray:
        """Return the tokens of "Anna has 482."."""
        verb = self.verb if verb is None else verb
        return np.concatenate([[name, verb, self.space], number, [self.stop]])

    def question(self, name: int) -> np.ndarray:
        """Return the tokens of "Anna has ", to be continued with the number."""
        return np.array([name, self.verb, self.space])


def front_of(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the ids that a tokenizer puts in front of every text [front]; if there are none, its
    start token.
    """
    front = list(tokenizer("")["input_ids"])
    if not front and tokenizer.bos_token_id is not None:
        front = [tokenizer.bos_token_id]
    return np.array(front, dtype=np.int64)


Sample = tuple[np.ndarray, np.ndarray]


def book_sample(
    front: np.ndarray, book: np.ndarray, length: int, rng: np.random.Generator
) -> Sample:
    """Make a sample of the front tokens and a passage of a book; ids and weights [length]."""
    ids = np.concatenate([front, passage(book, length - len(front), rng)])
    weights = np.ones(length)
    weights[: max(1, len(front))] = 0.0  # nothing predicts the first token, and the front is given
    return ids, weights


def passage(book: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """Return `length` tokens from a random place of a book; WeirError if the book is too short."""
    if len(book) <= length:
        raise WeirError(
            f"the text has only {len(book):,} tokens, but a passage of {length:,} tokens must be "
            "shorter than its text. Use a longer text."
        )
    place = int(rng.integers(0, len(book) - length))
    return book[place : place + length].astype(np.int64)


def segment_sample(
    words: Words, length: int, shortest: int, longest: int, rng: np.random.Generator
) -> Sample:
    """Make a sample of random segments, each twice, in random order; ids and weights [length].

    Only predictable tokens have weight: a segment's second occurrence, from its second token on.
    """
    size = int(rng.integers(shortest, longest + 1))
    count = length // (2 * size) + 1
    segments = rng.choice(words.plain, size=(count, size))
    order = rng.permutation(np.repeat(np.arange(count), 2))
    weights = np.ones((2 * count, size))
    weights[:, 0] = 0.0
    weights[np.unique(order, return_index=True)[1]] = 0.0  # the first occurrence of each segment
    ids = np.concatenate([words.front, segments[order].reshape(-1)])[:length]
    return ids, np.concatenate([np.zeros(len(words.front)), weights.reshape(-1)])[:length]


def recall_sample(
    words: Words, book: np.ndarray, length: int, plainly: float, rng: np.random.Generator
) -> Sample:
    """Make a sample of names with numbers in book text, each stated several times.

    A share `plainly` of the samples has the wording of the recall test. The others vary it (any
    token for a name, any token for the verb, numbers of one to five digits), so that the model
    learns the rule and not the wording. In three of ten samples of either kind, statements are at
    most 3 tokens apart. Returns ids and weights, both [length].
    """
    plain = rng.random() < plainly
    verb = words.verb if plain else int(rng.choice(words.plain))
    digits = DIGITS if plain else int(rng.integers(1, 6))
    filler = (0, 48) if rng.random() < 0.7 else (0, 4)
    pool = words.names if plain else words.plain
    count = int(rng.integers(3, min(24, len(pool))))
    names = rng.choice(pool, size=count, replace=False)
    numbers = rng.choice(words.digits, size=(count, digits))
    ids: list[np.ndarray] = [words.front]
    weights: list[np.ndarray] = [np.zeros(len(words.front))]
    held, order, stated = len(words.front), list[int](), set[int]()
    while held < length:
        order = order or rng.permutation(np.repeat(np.arange(count), 2)).tolist()
        # Each round states every fact twice, in random order.
        fact = order.pop()
        gap = int(rng.integers(*filler))
        statement = words.statement(names[fact], numbers[fact], verb)
        ids += [passage(book, gap, rng), statement]
        answer = np.zeros(len(statement))
        if fact in stated:  # a number stated for the first time cannot be predicted
            answer[-digits - 1 : -1] = 1.0
        weights += [np.zeros(gap), answer]
        stated.add(fact)
        held += gap + len(statement)
    return np.concatenate(ids)[:length], np.concatenate(weights)[:length]


def recall_exercise(
    words: Words,
    book: np.ndarray,
    distance: int,
    length: int,
    rng: np.random.Generator,
    facts: int = 8,
) -> tuple[np.ndarray, np.ndarray]:
    """Make one question: a prompt [length] and its answer [digits].

    The prompt holds `facts` names with numbers in book text; the number asked for was stated
    `distance` tokens before the answer.
    """
    stated, ask = 4 + DIGITS, 3
    if not stated < distance < length - 3 or facts * stated * 3 > length:
        raise WeirError(f"no room for {facts} facts and distance {distance} in {length} tokens")
    names = rng.choice(words.names, size=facts, replace=False)
    numbers = rng.choice(words.digits, size=(facts, DIGITS))
    row = np.concatenate([words.front, passage(book, length - len(words.front), rng)])
    row[length - ask :] = words.question(names[0])
    free = np.ones(length, dtype=bool)
    free[[*range(len(words.front)), *range(length - ask, length)]] = False
    # The first digit is `distance` tokens before the place of the answer, which is `length`.
    place = length - distance - 3
    for name, number in zip(names, numbers, strict=True):
        row[place : place + stated] = words.statement(name, number)
        free[place : place + stated] = False
        room = np.lib.stride_tricks.sliding_window_view(free, stated).all(axis=1)
        place = int(rng.choice(np.flatnonzero(room)))
    return row, numbers[0]
