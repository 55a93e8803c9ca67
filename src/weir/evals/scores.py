"""Scores answers against the right ones, and computes intervals of shares and means."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean, stdev
from typing import Any

from weir.errors import WeirError
from weir.evals.records import import_optional


def wilson(right: int, asked: int) -> tuple[float, float]:
    """Compute Wilson's 95 % interval of a share.

    Unlike the interval of the normal distribution, it stays within 0 and 1, and does not shrink to
    a point if all or no answers are right (Wilson 1927).
    """
    if asked == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.975)
    share, spread = right / asked, z * z / asked
    middle = (share + spread / 2) / (1 + spread)
    reach = z * math.sqrt(share * (1 - share) / asked + spread / (4 * asked)) / (1 + spread)
    # Rounding must not move the ends past 0 and 1.
    return max(0.0, middle - reach), min(1.0, middle + reach)


def count_right(right: int, asked: int) -> dict[str, Any]:
    """Return right answers as a row of a result: counts, share (None if nothing was asked), 95 %
    interval.
    """
    low, high = wilson(right, asked)
    share = right / asked if asked else None
    return {"right": right, "asked": asked, "accuracy": share, "low": low, "high": high}


def count_by_distance(right: Mapping[int, int], asked: int) -> dict[str, Any]:
    """Count right answers for all distances together, and for each distance under "by_distance".

    Args:
        right: the number of right answers at each distance between a fact and its question.
        asked: the number of questions at each distance.
    """
    return {
        **count_right(sum(right.values()), asked * len(right)),
        "by_distance": [{"distance": d, **count_right(n, asked)} for d, n in right.items()],
    }


def paired_shares(first: Sequence[bool], second: Sequence[bool]) -> tuple[float, float, float]:
    """Compute the difference of two shares of right answers to the same questions, and its 95 %
    interval.

    `first` and `second` say for each question whether one of two models, or policies, was right.

    Newcombe 1998, "Improved confidence intervals for the difference between binomial proportions
    based on paired data", method 10: it uses Wilson's intervals of both shares, and how often both
    answers to a question are right or both are wrong. The interval does not shrink to a point, even
    if the two always agree.
    """
    n = len(first)
    both = sum(one and other for one, other in zip(first, second, strict=True))
    one, other = sum(first) - both, sum(second) - both
    neither = n - both - one - other
    here, there = (both + one) / n, (both + other) / n
    (low, high), (low_there, high_there) = wilson(both + one, n), wilson(both + other, n)
    sides = (both + one) * (other + neither) * (both + other) * (one + neither)
    product = float(both * neither - one * other)
    # Newcombe's correction for continuity reduces a positive agreement, and a small one to none.
    product = max(product - n / 2, 0.0) if product > 0 else product
    agreement = product / math.sqrt(sides) if sides else 0.0

    def reach(mine: float, theirs: float) -> float:
        return math.sqrt(max(0.0, mine**2 - 2 * agreement * mine * theirs + theirs**2))

    below, above = reach(here - low, high_there - there), reach(high - here, there - low_there)
    return here - there, here - there - below, here - there + above


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Compute the mean of some figures, and the half-width of its 95 % interval.

    The interval is Student's, for few independent measurements. The half-width is None for a single
    figure.
    """
    if len(values) < 2:
        return fmean(values), None
    reach = student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values), reach


def student(freedom: int, confidence: float = 0.95) -> float:
    """Return half the width of the interval of a mean, in standard errors, by Student's t with
    `freedom` degrees of freedom.
    """
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Return the probability of Student's t between -t and t (Abramowitz and Stegun, 26.7.3 and
    26.7.4).
    """
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = term if freedom > 1 else 0.0
    for n in range(2 + odd, freedom - 1, 2):
        term *= math.cos(angle) ** 2 * (n - 1) / n
        total += term
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize(text: str) -> str:
    """Convert a text to SQuAD's normal form: lower case, no punctuation, no articles, single
    spaces.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def is_exact(answer: str, right: Sequence[str]) -> bool:
    """Whether an answer equals one of the right ones, after SQuAD's normalization."""
    return normalize(answer) in {normalize(one) for one in right}


def contains(answer: str, right: Sequence[str]) -> bool:
    """Whether an answer contains one of the right ones, after SQuAD's normalization."""
    said = normalize(answer)
    return any(normalize(one) in said for one in right)


def words_found(answer: str, right: str) -> float:
    """Return the share of the right answer's words that occur in an answer, after normalization; 1
    if the right answer has no words.

    This is the needle-in-a-haystack score of Fu et al. 2024, which BalanceKV (section 4.3) follows.
    """
    wanted = set(normalize(right).split())
    return len(wanted & set(normalize(answer).split())) / len(wanted) if wanted else 1.0


ROUGE = ("rouge1", "rouge2", "rougeL")


def rouge_scores(answers: Sequence[str], right: Sequence[str]) -> dict[str, float]:
    """Compute the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L, and the geometric mean of the three,
    from 0 to 1.

    Words are compared by their stems (Porter), as the metric's first implementation does with its
    option -m. "rouge", the geometric mean of the means, is BUZZ's mean score (section 4.2.1, Table
    2).
    """
    if not answers:
        raise WeirError("there are no summaries to compare")
    module = import_optional("rouge_score.rouge_scorer", "ROUGE")
    scorer = module.RougeScorer(list(ROUGE), use_stemmer=True)
    scores = [scorer.score(target, said) for said, target in zip(answers, right, strict=True)]
    means = {kind: sum(one[kind].fmeasure for one in scores) / len(scores) for kind in ROUGE}
    return {"rouge": math.prod(means.values()) ** (1 / len(ROUGE)), **means}


def self_bleu(texts: Sequence[str]) -> float | None:
    """Compute the mean BLEU of each text with all the others as references, from 0 to 1.

    BUZZ, section 4.2.3 and Figure 7, after Zhu et al. 2018. BLEU is sacrebleu's sentence BLEU,
    which leaves out n-grams longer than the text. None for fewer than two texts that are not empty.
    """
    sentence_bleu = import_optional("sacrebleu", "Self-BLEU").sentence_bleu
    known = [text for text in texts if text.strip()]
    if len(known) < 2:
        return None
    scores = [
        sentence_bleu(text, [*known[:i], *known[i + 1 :]]).score / 100
        for i, text in enumerate(known)
    ]
    return min(1.0, sum(scores) / len(scores))  # sacrebleu's 100 % is slightly above 100
