"""ROUGE of summaries and Self-BLEU of a set of texts, as rouge-score and sacrebleu define them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weir.errors import WeirError
from weir.evals.data import needed

KINDS = ("rouge1", "rouge2", "rougeL")


def rouge_scores(answers: Sequence[str], right: Sequence[str]) -> dict[str, float]:
    """Mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L, and the geometric mean of the three, from 0 to 1.

    Words are compared by their stems (Porter), as the metric's first implementation does. "rouge",
    the geometric mean of the means, is BUZZ's mean score (section 4.2.1, Table 2).

    Raises:
        WeirError: rouge-score is not installed, or there is nothing to compare.
    """
    if not answers:
        raise WeirError("there are no summaries to compare")
    module = needed("rouge_score.rouge_scorer", "ROUGE")
    scorer = module.RougeScorer(list(KINDS), use_stemmer=True)
    scores = [scorer.score(target, said) for said, target in zip(answers, right, strict=True)]
    means = {kind: sum(one[kind].fmeasure for one in scores) / len(scores) for kind in KINDS}
    return {"rouge": math.prod(means.values()) ** (1 / len(KINDS)), **means}


def self_bleu(texts: Sequence[str]) -> float | None:
    """How alike texts are: the mean BLEU of each with all the others as references, from 0 to 1.

    BUZZ, section 4.2.3 and Figure 7, after Zhu et al. 2018. BLEU is sacrebleu's of sentences, which
    leaves out orders longer than the text. None for fewer than two texts that are not empty.

    Raises:
        WeirError: sacrebleu is not installed.
    """
    sentence_bleu = needed("sacrebleu", "Self-BLEU").sentence_bleu
    known = [text for text in texts if text.strip()]
    if len(known) < 2:
        return None
    scores = [
        sentence_bleu(text, [*known[:i], *known[i + 1 :]]).score / 100
        for i, text in enumerate(known)
    ]
    return min(1.0, sum(scores) / len(scores))  # sacrebleu's 100 % is a little more
