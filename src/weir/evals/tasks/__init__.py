"""The tasks; importing this package registers all of them."""

from weir.evals.task import TASKS
from weir.evals.tasks import (
    agreement,
    attention_error,
    babi,
    choice,
    docqa,
    efficiency,
    exercises,
    found_facts,
    lines,
    longbench,
    loop,
    mtbench,
    natural_facts,
    needle,
    ppl,
    recalled_facts,
    ruler,
    ruler_recalled,
    streameval,
    summary,
)
from weir.evals.tasks.natural_facts import Facts
