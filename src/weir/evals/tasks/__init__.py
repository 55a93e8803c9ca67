"""The tasks, one file each; importing this makes all of them known."""

from weir.evals.task import TASKS
from weir.evals.tasks.ppl import Perplexity
from weir.evals.tasks.recall import Recall

__all__ = ["TASKS", "Perplexity", "Recall"]
