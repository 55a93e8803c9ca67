"""Runs the cells of a grid, in this process or on a Ray cluster, and records each when it is done.

A cell that fails is recorded with its reason, and the others continue. If a worker of Ray dies,
only the cell that it was running is run again, on another worker. Workers use as many threads for a
cell as this process would, so that the figures are bit-identical to those measured here. To run
more cells in parallel, set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from weir import __version__
from weir.errors import WeirError, first_line
from weir.evals.grid.grid import (
    Cell,
    Grid,
    Loaded,
    PaperProtocol,
    load_cached,
    named_pools,
    protocol,
)
from weir.evals.notation import takes_budget
from weir.evals.perplexity import NOT_FINITE
from weir.evals.records import import_optional
from weir.evals.results import CellRecord, ResultsFile
from weir.evals.task import Subject
from weir.policies import parse_policy

Numbered = tuple[int, Cell]
CellProgress = Callable[[int, float], None]
"""Function called with the number of a cell in the grid and the share of it that is done."""
Worker = Callable[[list[Numbered], CellProgress], Iterator[CellRecord]]
"""Function that runs cells and yields the record of each as it ends, in any order."""


def run(
    grid: Grid,
    path: Path,
    *,
    resume: bool = False,
    add: bool = False,
    models: Mapping[str, Loaded] | None = None,
    work: Worker | None = None,
    on_progress: CellProgress = lambda number, share: None,
    on_record: Callable[[CellRecord], None] = lambda record: None,
) -> list[CellRecord]:
    """Run unfinished cells, and return the records of all cells in grid order.

    Args:
        grid, path: the cells to run, and the results file.
        resume: continue an existing file; failed cells are tried again.
        add: continue an existing file whose grid is the beginning of this one, as `extend_grid`
            returns it.
        models: (model, tokenizer) by name in the grid; other models are loaded by name.
        work: runs the cells; by default this process, one after the other.
        on_progress: called while cells run.
        on_record: called with every record of the file, existing ones first.

    Raises:
        WeirError: the file has lines and `resume` and `add` are false, belongs to another grid or
            cannot be written; or models were given as objects and other processes do the work,
            which cannot receive them.
    """
    if models and work is not None:
        raise WeirError(
            "model objects can be measured only in this process. Save them to folders, and name "
            "the folders."
        )
    work = work or partial(one_by_one, models=models)
    with ResultsFile(path, grid.as_json(), resume=resume, add=add) as results:
        results.keep({n: one for n, one in results.records.items() if one["status"] == "done"})
        for record in results.records.values():
            on_record(record)
        left = [(n, cell) for n, cell in enumerate(grid.cells) if n not in results.records]
        for record in work(left, on_progress):
            results.append(record)
            on_record(record)
        results.keep(dict(sorted(results.records.items())))
        return list(results.records.values())


def one_by_one(
    cells: list[Numbered],
    on_progress: CellProgress,
    models: Mapping[str, Loaded] | None = None,
) -> Iterator[CellRecord]:
    """Run cells in this process, in order."""
    for number, cell in cells:
        yield measure(number, cell, partial(on_progress, number), models)


def measure(
    number: int,
    cell: Cell,
    progress: Callable[[float], None] = lambda share: None,
    models: Mapping[str, Loaded] | None = None,
) -> CellRecord:
    """Run one cell; an error becomes the cell's record."""
    begun = time.perf_counter()
    try:
        task = cell.the_task()
        subject = subject_of(cell, models or {})
        result = task.run(subject, progress)
        metric, better = next(iter(task.metrics.items()))
        value = result.get(metric)
        if value is not None and not math.isfinite(value):
            raise WeirError(f"{metric} cannot be computed: {NOT_FINITE}")
        found = {
            "status": "done",
            "metric": metric,
            "value": value,
            "better": better,
            "kv_bytes": result.get("kv_bytes"),
            "result": result,
        }
        if cell.pools is not None:
            ran = subject.ran.get(str(subject.policy), subject.policy.stands_for)
            found = {"pools": ran, **found}
    except Exception as error:
        found = {"status": "failed", "reason": failure_reason(error)}
    return record_of(number, cell, {**found, "seconds": round(time.perf_counter() - begun, 3)})


def record_of(number: int, cell: Cell, found: dict[str, Any]) -> CellRecord:
    """Return the record of a cell: everything that determines its figures, and the figures.

    For a policy with a name, "pools" has the pools that ran. These can depend on the model. If the
    name alone stands for other pools, they are in "stands_for".
    """
    facts = cell.as_json()
    if facts.get("pools") != found.get("pools", facts.get("pools")):
        facts["stands_for"] = facts["pools"]
    setting = facts.pop("task")
    name = setting.partition("(")[0]
    return {"cell": number, "task": name, "setting": setting, "weir": __version__, **facts, **found}


def subject_of(cell: Cell, models: Mapping[str, Loaded] = MappingProxyType({})) -> Subject:
    """Return the subject of a cell. Its model is taken from `models` by name, or else loaded."""
    if cell.pools is not None and (pools := named_pools(cell.policy)) != cell.pools:
        raise WeirError(
            f"{cell.policy} stood for {cell.pools} when this cell was requested, and stands for "
            f"{pools} now. To measure the earlier pools, name them instead of {cell.policy}."
        )
    model, tokenizer = models.get(cell.model) or load_cached(
        cell.model, cell.loading, cell.compiled
    )
    rules = PaperProtocol("") if cell.protocol is None else protocol(cell.protocol)
    return Subject(
        name=cell.model,
        model=model,
        tokenizer=tokenizer,
        policy=parse_policy(cell.policy),
        seed=cell.seed,
        chunk=cell.chunk,
        positions=cell.positions,
        prefill=rules.prefill,
        # Policies with their own size, or without a size, such as dense, run unchanged.
        rate=rules.rate if takes_budget(cell.policy) else None,
        keeps_answers=rules.keeps_answers,
        loading=cell.loading,
    )


def failure_reason(error: Exception) -> str:
    """Describe an error in one line."""
    lines = str(error).strip().splitlines()
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory" + (f": {lines[0]}" if lines else "")
    if isinstance(error, WeirError):
        return " ".join(lines)
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if not (frames := traceback.extract_tb(error.__traceback__)):
        return said
    return f"{said} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


LOCAL = "local"
TRIES = 4
"""How often a cell is started if its worker dies each time."""
CLUSTER_PATIENCE = 5.0
"""Seconds within which a cluster must answer."""


def on_ray(address: str) -> Worker:
    """Make a worker that runs cells on a cluster. Raises WeirError without Ray, or if no cluster
    answers.

    `local` is a temporary cluster on this machine, `host:port` a cluster's head, and
    `ray://host:port` one that takes clients.
    """
    # Ray's own log would repeat on standard error what weir reports in one line.
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    # Ray would give its workers a lower priority than everything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray = import_optional("ray", "--cluster", extra="ray")
    if address != LOCAL:
        _check_reachable(address)

    def work(cells: list[Numbered], on_progress: CellProgress) -> Iterator[CellRecord]:
        if not cells:
            return
        threads = torch.get_num_threads()
        ours = not ray.is_initialized()
        if ours:
            _connect(ray, address)
        try:
            most = max(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
            # A cell must fit on some machine, or Ray would wait forever for a larger one.
            how = {"num_cpus": min(threads, most), "max_retries": TRIES - 1}
            remote = ray.remote(**how)(_measure_on_worker).remote
            # Pass a dictionary, because the worker would have to import all of weir to read a
            # `Cell`.
            waiting = {remote(n, cell.as_json(), threads): (n, cell) for n, cell in cells}
            while waiting:
                (ended, *_), _ = ray.wait(list(waiting))
                number, cell = waiting.pop(ended)
                try:
                    yield ray.get(ended)
                    continue
                except ray.exceptions.WorkerCrashedError:
                    why = f"its worker died {TRIES} times"
                except ray.exceptions.RayError as error:
                    said = str(error).strip().splitlines() or [type(error).__name__]
                    why = f"its worker could not run it: {said[-1].strip()}"
                failed = {"status": "failed", "reason": why, "seconds": None}
                yield record_of(number, cell, failed)
        finally:
            if ours:
                ray.shutdown()

    return work


def _measure_on_worker(number: int, cell: dict[str, Any], threads: int) -> CellRecord:
    """Run a cell, given by its fields, in a worker."""
    torch.set_num_threads(threads)
    return measure(number, Cell.of(cell))


def _connect(ray: Any, address: str) -> None:
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address == LOCAL:
        quiet["include_dashboard"] = False
    try:
        ray.init(address=address, **quiet)
    except Exception as error:
        raise WeirError(f"the cluster {address} cannot be used: {first_line(error)}") from None


def _check_reachable(address: str) -> None:
    """Check that a cluster answers, because Ray itself would try for a minute and then exit."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise WeirError(
            f"--cluster must be 'local', 'host:port' or 'ray://host:port', got {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CLUSTER_PATIENCE).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WeirError(f"no cluster answers at {address}: {reason}") from None
