"""The baseline: n-grams of token ids under interpolated modified Kneser-Ney smoothing.

Chen & Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 3:
each n-gram that was seen gives up a discount that depends on its count (1, 2, or 3 and more). The
discounts of a context go to the next shorter context. There, an n-gram counts not by how often it
occurs, but by how many different tokens it follows. Below single tokens is the uniform
distribution.

The model works on token ids. Only `main` reads text and uses a tokenizer. An n-gram is one integer
with its first token in the highest bits, so sorting groups n-grams by context.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from weir.errors import WeirError

USUAL_DISCOUNTS = (0.5, 1.0, 1.5)
"""Used if a text is too small for the paper's estimate."""


@dataclass(frozen=True)
class Level:
    """What is known about the n-grams of one length.

    Attributes:
        discounts: the discounts of counts of 1, of 2, and of 3 and more.
        grams: the n-grams, ascending [types].
        share: each n-gram's discounted share of the counts of its context [types].
        contexts: the contexts (the first n - 1 tokens of the n-grams), ascending [contexts].
        rest: the probability that each context leaves to the next shorter one [contexts].
    """

    discounts: tuple[float, ...]
    grams: np.ndarray
    share: np.ndarray
    contexts: np.ndarray
    rest: np.ndarray

    @classmethod
    def of(cls, grams: np.ndarray, counts: np.ndarray, bits: int) -> Level:
        """The level of ascending n-grams of `bits` bits a token that occur `counts` times."""
        discounts = _discounts(counts)
        taken = np.array([0.0, *discounts])[np.minimum(counts, 3)]
        context = grams >> bits
        first = np.flatnonzero(np.diff(context, prepend=-1))
        total = np.add.reduceat(counts, first)
        of_context = np.diff(first, append=len(grams))
        return cls(
            discounts,
            grams,
            (counts - taken) / np.repeat(total, of_context),
            context[first],
            np.add.reduceat(taken, first) / total,
        )


@dataclass(frozen=True)
class NGram:
    """An n-gram model; `train` makes one.

    Attributes:
        vocabulary: how many tokens there are.
        levels: n-grams of length 1, 2, ... up to the model's order.
    """

    vocabulary: int
    levels: tuple[Level, ...]

    def nll(self, tokens: ArrayLike) -> np.ndarray:
        """Negative log-likelihood of each token given those before it; nats, [tokens].

        A token is predicted from the `order - 1` tokens before it. At the beginning there are
        fewer: none before the first token, one before the second.

        Raises:
            WeirError: a token is not in the vocabulary.
        """
        ids = _ids(tokens, self.vocabulary)
        bits = _bits(self.vocabulary)
        likely = np.full(len(ids), 1.0 / self.vocabulary)
        for n, level in enumerate(self.levels, start=1):
            grams = _grams(ids, n, bits)
            deep = likely[n - 1 :]  # the tokens with a context as long as this
            deep *= _look_up(level.contexts, level.rest, grams >> bits, otherwise=1.0)
            deep += _look_up(level.grams, level.share, grams, otherwise=0.0)
        return -np.log(likely)


def train(tokens: ArrayLike, order: int = 5, vocabulary: int = 4096) -> NGram:
    """The model of a text.

    Args:
        tokens: the text's token ids.
        order: length of the longest n-grams.
        vocabulary: how many tokens there are.

    Raises:
        WeirError: a token is not in the vocabulary, n-grams of such tokens do not fit in 63 bits,
            or the text is shorter than one n-gram.
    """
    bits = _bits(vocabulary)
    if order < 1 or order * bits > 63:
        raise WeirError(
            f"{order}-grams over {vocabulary:,} tokens cannot be counted: the order must be from 1 "
            f"to {63 // bits}, because an n-gram is packed into 63 bits and a token takes {bits}"
        )
    ids = _ids(tokens, vocabulary)
    if len(ids) < order:
        raise WeirError(f"a text of {len(ids)} tokens holds no {order}-gram")
    levels = [Level.of(*np.unique(_grams(ids, order, bits), return_counts=True), bits)]
    for n in range(order - 1, 0, -1):
        longer = np.sort(_grams(ids, n + 1, bits))
        # This does what `np.unique` does. Without `return_counts`, `np.unique` uses hashing, which
        # is far slower for millions of n-grams.
        longer = longer[np.diff(longer, prepend=-1) != 0]
        # Without its first token, an n-gram occurs once for each different token that it follows.
        followed = longer & ((1 << n * bits) - 1)
        levels.append(Level.of(*np.unique(followed, return_counts=True), bits))
    return NGram(vocabulary, tuple(reversed(levels)))


def _discounts(counts: np.ndarray) -> tuple[float, ...]:
    """D1, D2 and D3+ from how many n-grams have a count of 1, 2, 3 and 4."""
    n1, n2, n3, n4 = (int((counts == count).sum()) for count in (1, 2, 3, 4))
    if not n1 * n2 * n3 * n4:
        return USUAL_DISCOUNTS
    y = n1 / (n1 + 2 * n2)
    found = (1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    # In an unusual text, the formula gives a discount below 0 or above the count.
    usable = all(0 <= discount <= count for count, discount in enumerate(found, start=1))
    return found if usable else USUAL_DISCOUNTS


def _bits(vocabulary: int) -> int:
    return max(1, (vocabulary - 1).bit_length())


def _ids(tokens: ArrayLike, vocabulary: int) -> np.ndarray:
    ids = np.asarray(tokens)
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise WeirError(
            f"token ids run from {ids.min()} to {ids.max()}; a vocabulary of {vocabulary:,} has "
            f"0 to {vocabulary - 1:,}"
        )
    return ids


def _grams(ids: np.ndarray, n: int, bits: int) -> np.ndarray:
    """Every n-gram of a text, in the text's order [tokens - n + 1]."""
    count = max(len(ids) - n + 1, 0)
    packed = np.zeros(count, dtype=np.int64)
    for place in range(n):
        packed <<= bits
        packed |= ids[place : place + count].astype(np.int64)
    return packed


def _look_up(
    keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, otherwise: float
) -> np.ndarray:
    """The value of each wanted key, or `otherwise` if there is none; `keys` must ascend."""
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], otherwise)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the perplexity that a model trained on one text has on another."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tokenizer", required=True, help="a folder with a tokenizer")
    parser.add_argument("--text", required=True, type=Path, help="books to train on")
    parser.add_argument("--on", required=True, type=Path, help="the text to read")
    parser.add_argument("--tokens", type=int, help="tokens to read of it; default: all")
    parser.add_argument("--order", type=int, default=5, help="length of the longest n-grams")
    parser.add_argument(
        "--cache",
        type=Path,
        help="a .npy file to store the books' tokens in",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    try:
        facts = _measure(given)
    except WeirError as error:
        sys.exit(f"weir: {error}")
    told = (
        f"{given.on}: perplexity {facts['ppl']:.2f} on {facts['tokens']:,} tokens, "
        f"{facts['order']}-grams of {facts['trained_on']:,} tokens"
    )
    sys.stdout.write((json.dumps(facts) if given.json else told) + "\n")


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    from rich.console import Console
    from transformers import AutoTokenizer

    from weir.stream import encode, read_books, read_text
    from weir.train import corpus

    with Console(stderr=True).status("encoding") as status:
        try:
            tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise WeirError(f"{given.tokenizer} holds no tokenizer: {reason}") from None
        ids = encode(tokenizer, read_text(given.on), given.tokens).numpy()
        books = read_books(given.text)
        known = (
            corpus.load_or_encode(given.cache, books, tokenizer)
            if given.cache
            else corpus.encode(books, tokenizer)
        )
        status.update(f"counting {given.order}-grams")
        model = train(known, given.order, len(tokenizer))
        status.update("reading")
        nll = model.nll(ids)[1:]  # nothing comes before the first token, so it is not scored
    return {
        "ppl": float(np.exp(nll.mean())),
        "tokens": len(ids),
        "order": given.order,
        "trained_on": len(known),
        "discounts": [level.discounts for level in model.levels],
    }


if __name__ == "__main__":
    main()
