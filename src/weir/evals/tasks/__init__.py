"""The tasks, one file each; importing this package registers all of them."""

from weir.evals.task import TASKS
from weir.evals.tasks.attention_error import AttentionError
from weir.evals.tasks.babi import Babi
from weir.evals.tasks.choice import Choice
from weir.evals.tasks.docqa import DocumentQA
from weir.evals.tasks.efficiency import Efficiency
from weir.evals.tasks.instruction import Instruction
from weir.evals.tasks.lines import Lines
from weir.evals.tasks.longbench import LongBench
from weir.evals.tasks.loop import Loop
from weir.evals.tasks.mtbench import MTBench
from weir.evals.tasks.natural_facts import Facts
from weir.evals.tasks.needle import Needle
from weir.evals.tasks.ppl import Perplexity
from weir.evals.tasks.recall import Recall
from weir.evals.tasks.ruler import Ruler
from weir.evals.tasks.said_again import Changed, Repeated
from weir.evals.tasks.streameval import StreamEval
from weir.evals.tasks.summary import Summary
from weir.evals.tasks.verbatim import Verbatim

__all__ = [
    "TASKS",
    "AttentionError",
    "Babi",
    "Changed",
    "Choice",
    "DocumentQA",
    "Efficiency",
    "Facts",
    "Instruction",
    "Lines",
    "LongBench",
    "Loop",
    "MTBench",
    "Needle",
    "Perplexity",
    "Recall",
    "Repeated",
    "Ruler",
    "StreamEval",
    "Summary",
    "Verbatim",
]
