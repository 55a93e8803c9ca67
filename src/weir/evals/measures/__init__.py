"""What is measured of an answer or of a text that was read."""

from weir.evals.measures.answers import Answer, ask, check_template, costs, generate_answer
from weir.evals.measures.captions import caption_scores
from weir.evals.measures.intervals import around_mean, counted
from weir.evals.measures.likelihood import likelihoods, padded
from weir.evals.measures.perplexity import STEP, PerplexityMeter, Reading, read
from weir.evals.measures.rouge import rouge_scores, self_bleu
from weir.evals.measures.squad import contains, is_exact, words_found

__all__ = [
    "STEP",
    "Answer",
    "PerplexityMeter",
    "Reading",
    "around_mean",
    "ask",
    "caption_scores",
    "check_template",
    "contains",
    "costs",
    "counted",
    "generate_answer",
    "is_exact",
    "likelihoods",
    "padded",
    "read",
    "rouge_scores",
    "self_bleu",
    "words_found",
]
