"""How answers in words are compared with the right ones: SQuAD's normal form of a text.

Rajpurkar et al. 2016: small letters, without punctuation, articles and extra space. Lost in the
Middle (Liu et al. 2023) and BUZZ score their answers on it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normal(text: str) -> str:
    """A text in small letters, without punctuation, articles and extra space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def is_exact(answer: str, right: Sequence[str]) -> bool:
    """Whether an answer is one of the right ones, in their normal form."""
    return normal(answer) in {normal(one) for one in right}


def contains(answer: str, right: Sequence[str]) -> bool:
    """Whether a right answer stands somewhere in an answer, in their normal form."""
    said = normal(answer)
    return any(normal(one) in said for one in right)


def words_found(answer: str, right: str) -> float:
    """The share of a right answer's words that an answer has, in their normal form.

    Fu et al. 2024 score the needle in a haystack so, which BalanceKV (section 4.3) follows.
    """
    wanted = set(normal(right).split())
    return len(wanted & set(normal(answer).split())) / len(wanted) if wanted else 1.0
