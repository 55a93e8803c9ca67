"""What the packaged model practices: books, shuffled segments, and names with numbers.

Each sample is a row of token ids that begins with the tokens that the tokenizer puts in front of
every text, and a weight for every token: 0 where nothing can be learnt from predicting it. Knows
nothing about models.

Text alone does not teach a small model to look things up. *Segments*, pieces of random tokens that
come back in shuffled order, teach it to find an earlier passage by content and to copy on from
there; *recall* turns that into an answer: "Anna has 482." among book text, and later
"Anna has" once more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from weir.errors import WeirError

VERB = " has"
DIGITS = 3
PRACTICED = "weir_exercises"
"""The entry of a model's configuration that says whether it was trained on exercises."""
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
    """Whether the model that a configuration describes was trained on these exercises."""
    return getattr(config.get_text_config(decoder=True), PRACTICED, False) is True


@dataclass(frozen=True)
class Words:
    """The tokens exercises are made of, found in a tokenizer's vocabulary.

    `front` stands before every text: the start token, or more, or nothing.
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
        """The exercises' tokens; of `NAMES`, those that are one token with the space before them.

        Raises:
            WeirError: a word or digit that must be one token is not, or too few names are.
        """

        def ids_of(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        def one(text: str) -> int:
            ids = ids_of(text)
            if len(ids) != 1:
                raise WeirError(
                    f"the exercises need {text!r} to be one token, and in this tokenizer it is "
                    f"{len(ids)}: train it on more text or with a larger vocabulary"
                )
            return ids[0]

        names = [ids[0] for ids in (ids_of(f" {name}") for name in NAMES) if len(ids) == 1]
        if len(names) < 12:
            raise WeirError(
                f"the exercises need 12 names that are one token, and this tokenizer has "
                f"{len(names)}: train it on more text or with a larger vocabulary"
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
        """The tokens of "Anna has 482."."""
        verb = self.verb if verb is None else verb
        return np.concatenate([[name, verb, self.space], number, [self.stop]])

    def question(self, name: int) -> np.ndarray:
        """The tokens of "Anna has ", to be continued with the number."""
        return np.array([name, self.verb, self.space])


def front_of(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """The ids that stand in front of every text [front]: those the tokenizer puts there itself.

    Of one that puts none, its start token, if it has that.
    """
    front = list(tokenizer("")["input_ids"])
    if not front and tokenizer.bos_token_id is not None:
        front = [tokenizer.bos_token_id]
    return np.array(front, dtype=np.int64)


Sample = tuple[np.ndarray, np.ndarray]


def book_sample(
    front: np.ndarray, book: np.ndarray, length: int, rng: np.random.Generator
) -> Sample:
    """The tokens in front and a stretch of a book; ids and weights [length].

    Which stretch does not depend on what stands in front, only on how long it is.
    """
    ids = np.concatenate([front, passage(book, length - len(front), rng)])
    weights = np.ones(length)
    weights[: max(1, len(front))] = 0.0  # nothing predicts the first token, nobody need the front
    return ids, weights


def passage(book: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """A stretch of `length` tokens from a random place."""
    place = int(rng.integers(0, len(book) - length))
    return book[place : place + length].astype(np.int64)


def segment_sample(
    words: Words, length: int, shortest: int, longest: int, rng: np.random.Generator
) -> Sample:
    """Segments of random tokens, each twice, in random order; ids and weights [length].

    Only what can be known has weight: a segment's second coming, from its second token on.
    """
    size = int(rng.integers(shortest, longest + 1))
    count = length // (2 * size) + 1
    segments = rng.choice(words.plain, size=(count, size))
    order = rng.permutation(np.repeat(np.arange(count), 2))
    weights = np.ones((2 * count, size))
    weights[:, 0] = 0.0
    weights[np.unique(order, return_index=True)[1]] = 0.0  # where each segment comes first
    ids = np.concatenate([words.front, segments[order].reshape(-1)])[:length]
    return ids, np.concatenate([np.zeros(len(words.front)), weights.reshape(-1)])[:length]


def recall_sample(
    words: Words, book: np.ndarray, length: int, plainly: float, rng: np.random.Generator
) -> Sample:
    """Names with numbers among book text, each said two or three times; ids, weights [length].

    A share `plainly` of the samples is as the exercises are. The others vary what can be varied
    (any word for a name, any word for the verb, numbers of one to five digits, no book text
    between), so that the rule is learnt and not the wording.
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
    held, order, told = len(words.front), list[int](), set[int]()
    while held < length:
        order = order or rng.permutation(np.repeat(np.arange(count), 2)).tolist()
        # The first round says each fact for the first time somewhere; later ones only ask again.
        fact = order.pop()
        gap = int(rng.integers(*filler))
        said = words.statement(names[fact], numbers[fact], verb)
        ids += [passage(book, gap, rng), said]
        # Nobody can know a number that was never said before.
        answer = _answer_weight(len(said), digits if fact in told else 0)
        weights += [np.zeros(gap), answer]
        told.add(fact)
        held += gap + len(said)
    return np.concatenate(ids)[:length], np.concatenate(weights)[:length]


def _answer_weight(length: int, digits: int) -> np.ndarray:
    """Weights of a statement [length]: its last `digits` tokens but for the full stop count."""
    weight = np.zeros(length)
    weight[length - digits - 1 : length - 1] = 1.0
    return weight


def recall_exercise(
    words: Words,
    book: np.ndarray,
    distance: int,
    length: int,
    rng: np.random.Generator,
    facts: int = 8,
) -> tuple[np.ndarray, np.ndarray]:
    """One question: its prompt [length] and its answer [digits].

    `facts` names with numbers stand in book text; the one that is asked for was said `distance`
    tokens before the answer is due.

    Raises:
        WeirError: the facts do not fit, or `distance` is not between 8 and `length` - 4.
    """
    said = 4 + DIGITS
    ask = 3
    if not said < distance < length - 3 or facts * said * 3 > length:
        raise WeirError(f"no room for {facts} facts and distance {distance} in {length} tokens")
    names = rng.choice(words.names, size=facts, replace=False)
    numbers = rng.choice(words.digits, size=(facts, DIGITS))
    row = np.concatenate([words.front, passage(book, length - len(words.front), rng)])
    row[length - ask :] = words.question(names[0])
    free = np.ones(length, dtype=bool)
    free[[*range(len(words.front)), *range(length - ask, length)]] = False
    # The first digit stands `distance` tokens before the place of the answer, which is `length`.
    place = length - distance - 3
    for name, number in zip(names, numbers, strict=True):
        row[place : place + said] = words.statement(name, number)
        free[place : place + said] = False
        room = np.lib.stride_tricks.sliding_window_view(free, said).all(axis=1)
        place = int(rng.choice(np.flatnonzero(room)))
    return row, numbers[0]
