"""What is measured of an answer or of a text that was read."""

from weir.evals.measures.answers import Answer, answer, cut
from weir.evals.measures.asking import ask, check_template, taken
from weir.evals.measures.intervals import counted
from weir.evals.measures.likelihood import likelihoods, padded
from weir.evals.measures.perplexity import STEP, Reader, Reading, read
from weir.evals.measures.rouge import rouge_scores, self_bleu
from weir.evals.measures.squad import contains, is_exact, words_found

__all__ = [
    "STEP",
    "Answer",
    "Reader",
    "Reading",
    "answer",
    "ask",
    "check_template",
    "contains",
    "counted",
    "cut",
    "is_exact",
    "likelihoods",
    "padded",
    "read",
    "rouge_scores",
    "self_bleu",
    "taken",
    "words_found",
]
