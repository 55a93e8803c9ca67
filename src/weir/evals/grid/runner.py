"""Runs the cells of a grid, one after the other or on a cluster, and records each when it is done.

A cell that fails is recorded with its reason and stops nothing. Knows nothing about the terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from weir import __version__
from weir.errors import WeirError
from weir.evals.grid.grid import Cell, Grid, pools_of
from weir.evals.grid.growing import resumed
from weir.evals.grid.protocols import Protocol, protocol
from weir.evals.notation import takes_budget
from weir.evals.results import CellRecord, ResultsFile, failures
from weir.evals.task import Subject
from weir.models import compile_steps, load
from weir.policies import parse_policy

Numbered = tuple[int, Cell]
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
"""A model and its tokenizer."""
Told = Callable[[int, float], None]
"""Told of a cell, by its number in the grid, how much of it is done."""
Worker = Callable[[list[Numbered], Told], Iterator[CellRecord]]
"""Runs cells and yields the record of each as it ends, in any order."""


def run(
    grid: Grid,
    path: Path,
    *,
    resume: bool = False,
    add: bool = False,
    models: Mapping[str, Loaded] | None = None,
    work: Worker | None = None,
    on_progress: Told = lambda number, share: None,
    on_record: Callable[[CellRecord], None] = lambda record: None,
) -> list[CellRecord]:
    """Run what is not done yet, and return the records of all cells in the order of the grid.

    Args:
        grid: what to run.
        path: the results file.
        resume: go on with the file that is there; cells that failed are tried again.
        add: the same where the file's grid is the beginning of this one, as `grown` makes them.
        models: models and their tokenizers by the names that the grid has for them; others are
            loaded by their names.
        work: who runs the cells; by default this process, one after the other.
        on_progress: told while cells run.
        on_record: told of each record once it is in the file, and first of those that were there.

    Raises:
        WeirError: the file is of another grid or cannot be written; or models were given, and
            others do the work, who cannot be given any.
    """
    if models and work is not None:
        raise WeirError(
            "models that are objects can be measured in this process alone; save them to folders, "
            "and name these"
        )
    if resume and not add:
        grid = resumed(path, grid)
    work = work or partial(one_by_one, models=models)
    with ResultsFile(path, grid.as_json(), resume=resume, add=add) as results:
        results.forget({record["cell"] for record in failures(results.records.values())})
        for record in results.records.values():
            on_record(record)
        left = [(n, cell) for n, cell in enumerate(grid.cells) if n not in results.records]
        for record in work(left, on_progress):
            results.append(record)
            on_record(record)
        results.sort()
        return list(results.records.values())


def one_by_one(
    cells: list[Numbered],
    told: Told,
    models: Mapping[str, Loaded] | None = None,
) -> Iterator[CellRecord]:
    """Cells in this process, in order."""
    for number, cell in cells:
        yield measure(number, cell, partial(told, number), models)


def measure(
    number: int,
    cell: Cell,
    progress: Callable[[float], None] = lambda share: None,
    models: Mapping[str, Loaded] | None = None,
) -> CellRecord:
    """Run one cell; whatever goes wrong in it becomes its record."""
    begun = time.perf_counter()
    try:
        found = _figures(cell, progress, models or {})
    except Exception as error:
        return failed(number, cell, reason(error), time.perf_counter() - begun)
    return {**_facts(number, cell), **found, "seconds": round(time.perf_counter() - begun, 3)}


def failed(number: int, cell: Cell, why: str, seconds: float | None = None) -> CellRecord:
    """The record of a cell that failed, after so many seconds if that is known."""
    took = None if seconds is None else round(seconds, 3)
    return {**_facts(number, cell), "status": "failed", "reason": why, "seconds": took}


def _facts(number: int, cell: Cell) -> CellRecord:
    """What every record of a cell says."""
    return {
        "cell": number,
        "model": cell.model,
        "task": cell.task.partition("(")[0],
        "setting": cell.task,
        "policy": cell.policy,
        "budget": cell.budget,
        "seed": cell.seed,
        "protocol": cell.protocol,
        "chunk": cell.chunk,
        "positions": cell.positions,
        "weir": __version__,
        **({} if cell.memory is None else {"memory": cell.memory}),
        **({"loading": dict(cell.loading)} if cell.loading else {}),
        **({"compiled": True} if cell.compiled else {}),
        **({} if cell.pools is None else {"pools": cell.pools}),
    }


def _figures(
    cell: Cell, progress: Callable[[float], None], models: Mapping[str, Loaded]
) -> CellRecord:
    task = cell.the_task()
    result = task.run(subject_of(cell, models), progress)
    metric, better = next(iter(task.metrics.items()))
    return {
        "status": "done",
        "metric": metric,
        "value": result.get(metric),
        "better": better,
        "kv_bytes": result.get("kv_bytes"),
        "result": result,
    }


def subject_of(cell: Cell, models: Mapping[str, Loaded] = MappingProxyType({})) -> Subject:
    """The model and how it is to read.

    Args:
        cell: what is measured.
        models: those that need not be loaded, by name.

    Raises:
        WeirError: there is no such model, or the policy's name stands for other pools by now.
    """
    if cell.pools is not None and (pools := pools_of(cell.policy)) != cell.pools:
        raise WeirError(
            f"{cell.policy} was {cell.pools} when this was asked for, and is {pools} now; ask for "
            "these pools by themselves"
        )
    model, tokenizer = models.get(cell.model) or _loaded(cell.model, cell.loading, cell.compiled)
    rules = Protocol("") if cell.protocol is None else protocol(cell.protocol)
    return Subject(
        name=cell.model,
        model=model,
        tokenizer=tokenizer,
        policy=parse_policy(cell.policy),
        seed=cell.seed,
        chunk=cell.chunk,
        positions=cell.positions,
        prefill=rules.prefill,
        # What has a size of its own, or none as dense, is compared as it is.
        rate=rules.rate if takes_budget(cell.policy) else None,
        keeps_answers=rules.keeps_answers,
        loading=cell.loading,
    )


@lru_cache(maxsize=1)
def _loaded(name: str, loading: tuple[tuple[str, Any], ...], compiled: bool) -> Loaded:
    """A model; the cells of one come one after the other, so the last is kept and no other."""
    model, tokenizer = load(name, **dict(loading))
    if compiled:
        compile_steps(model, strict=True)  # or a cell would say so of steps that are not
    return model, tokenizer


def reason(error: Exception) -> str:
    """What went wrong, in one line."""
    lines = str(error).strip().splitlines()
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory" + (f": {lines[0]}" if lines else "")
    if isinstance(error, WeirError):
        return " ".join(lines)
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
