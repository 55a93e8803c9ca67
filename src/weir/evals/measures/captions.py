"""What the captions of images are worth: BLEU, ROUGE-L and CIDEr as COCO's caption evaluation has.

Chen et al. 2015, "Microsoft COCO Captions", section 3. BLEU is sacrebleu's over the whole set,
ROUGE-L rests on rouge-score's precision and recall, CIDEr-D is written here: the package that has
it (pycocoevalcap) is kept by nobody. COCO splits words by Stanford's tokenizer, in Java; `words`
does nearly the same in a line. METEOR needs Java and WordNet and is left out. Knows nothing about
models or files.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from weir.errors import WeirError
from weir.evals.data import needed

ORDERS = (1, 2, 3, 4)
"""Words of an n-gram, of BLEU and CIDEr."""
BETA = 1.2
"""How much more recall counts than precision in COCO's ROUGE-L."""
SIGMA = 6.0
"""Words by which lengths may differ in CIDEr-D, as a standard deviation."""
_WORD = re.compile(r"\w+(?=n't)|n't|'\w+|\w+(?:-\w+)*")

Grams = Counter[tuple[str, ...]]


def words(text: str) -> list[str]:
    """The words of a caption as COCO compares them: in lower case, without punctuation."""
    return _WORD.findall(text.lower().replace("’", "'"))


def caption_scores(captions: Sequence[str], right: Sequence[Sequence[str]]) -> dict[str, float]:
    """All figures of a set of captions, "bleu1" to "bleu4", "rougeL" and "cider", as 0.795 is one.

    Args:
        captions: of each image.
        right: of each image, the captions that people wrote; one or more.

    Raises:
        WeirError: a package is missing, or there is nothing to compare.
    """
    if not captions or not all(right):
        raise WeirError("there are no captions to compare")
    said = [words(caption) for caption in captions]
    theirs = [[words(one) for one in those] for those in right]
    return {
        **{f"bleu{order}": bleu(said, theirs, order) for order in ORDERS},
        "rougeL": rouge_l(said, theirs),
        "cider": cider(said, theirs),
    }


def bleu(said: Sequence[list[str]], right: Sequence[Sequence[list[str]]], order: int) -> float:
    """BLEU of a set up to n-grams of `order` words, against the references nearest in length.

    Raises:
        WeirError: sacrebleu is not installed.
    """
    most = max(map(len, right))
    # By reference and not by image; where an image has fewer, there is none.
    streams = [[" ".join(own[i]) if i < len(own) else None for own in right] for i in range(most)]
    metric = needed("sacrebleu", "BLEU").BLEU(
        max_ngram_order=order, tokenize="none", smooth_method="none", force=True
    )
    return float(metric.corpus_score([" ".join(one) for one in said], streams).score) / 100


def rouge_l(said: Sequence[list[str]], right: Sequence[Sequence[list[str]]]) -> float:
    """Mean ROUGE-L: of each image the best precision and the best recall of its references.

    Raises:
        WeirError: rouge-score is not installed.
    """
    module = needed("rouge_score.rouge_scorer", "ROUGE-L")
    scorer = module.RougeScorer(["rougeL"], tokenizer=_Spaces())
    total = 0.0
    for one, own in zip(said, right, strict=True):
        scores = [scorer.score(" ".join(other), " ".join(one))["rougeL"] for other in own]
        precision = max(score.precision for score in scores)
        recall = max(score.recall for score in scores)
        if precision and recall:
            total += (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)
    return total / len(said)


class _Spaces:
    """rouge-score's tokenizer for words that are told apart already."""

    def tokenize(self, text: str) -> list[str]:
        """The words."""
        return text.split()


def cider(said: Sequence[list[str]], right: Sequence[Sequence[list[str]]]) -> float:
    """CIDEr-D (Vedantam, Zitnick and Parikh 2015, section 7), from 0 to 10.

    n-grams weigh by how few images have them among their references, so that of a single image
    nothing weighs anything, and the figure is 0.
    """
    seen_in: Counter[tuple[str, ...]] = Counter()
    for own in right:
        seen_in.update({gram for other in own for gram in _grams(other)})
    images = math.log(len(right))
    weight = {gram: images - math.log(count) for gram, count in seen_in.items()}

    def vectors(tokens: list[str]) -> list[dict[tuple[str, ...], float]]:
        found: list[dict[tuple[str, ...], float]] = [{} for _ in ORDERS]
        for gram, count in _grams(tokens).items():
            found[len(gram) - 1][gram] = count * weight.get(gram, images)
        return found

    total = 0.0
    for one, own in zip(said, right, strict=True):
        mine, mean = vectors(one), 0.0
        for other in own:
            # As COCO's code measures lengths: by their pairs of words.
            apart = max(0, len(one) - 1) - max(0, len(other) - 1)
            alike = sum(map(_likeness, mine, vectors(other))) / len(ORDERS)
            mean += alike * math.exp(-(apart**2) / (2 * SIGMA**2)) / len(own)
        total += 10 * mean
    return total / len(said)


def _grams(tokens: list[str]) -> Grams:
    """How often each n-gram of 1 to 4 words stands in a caption."""
    return Counter(
        tuple(tokens[i : i + order]) for order in ORDERS for i in range(len(tokens) - order + 1)
    )


def _likeness(mine: dict[tuple[str, ...], float], other: dict[tuple[str, ...], float]) -> float:
    """The cosine of two vectors, of which the caption's is cut to the reference's."""
    norms = math.hypot(*mine.values()) * math.hypot(*other.values())
    both = ((value, other[gram]) for gram, value in mine.items() if gram in other)
    common = sum(min(one, two) * two for one, two in both)
    return common / norms if norms else common
