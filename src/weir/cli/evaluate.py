"""`weir eval`: run a resumable grid of models, policies, budgets, tasks and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from weir.cli import options
from weir.cli.app import command
from weir.cli.common import (
    WIDE,
    RemainingTime,
    describe_parameters,
    first_paragraph,
    in_lines,
    in_words,
    output,
    print_json,
    print_line,
    print_table,
    progress,
    say,
)
from weir.cli.loading import Loading, loads_model
from weir.cli.runtime import Terminated, freeze_imports

if TYPE_CHECKING:
    from rich.table import Table

    from weir.evals.grid import Grid, Worker
    from weir.evals.results import CellRecord, Column
    from weir.evals.results import FigureTable as Figures


class Equal(StrEnum):
    """Names what is equal for all policies of a comparison."""

    slots = "slots"
    bytes = "bytes"
    kv = "kv"


USUAL = (128, 256, 384)
"""Default budgets, chosen for nano: the largest leaves room for a chunk in its window of 512."""


@command("eval")
@loads_model()
def evaluate(
    context: Context,
    tasks: Annotated[
        str, Option("--tasks", "--task", help="Comma-separated tasks: 'ppl(tokens=5000), recall'.")
    ] = "ppl, recall, streameval, attention-error",
    policies: Annotated[
        str,
        Option(
            help="Comma-separated policies, or all for every named policy but recompute, kvzip, "
            "pinned, pyramid and quantized."
        ),
    ] = "all",
    model: Annotated[
        str, Option(help="Comma-separated models: nano, smollm2, folders, .gguf files or Hub ids.")
    ] = "nano",
    budgets: Annotated[
        str | None,
        Option(
            help="Budgets for policies that are given without one [default: 128,256,384, or what "
            "the protocol sets]"
        ),
    ] = None,
    memory: Annotated[
        str | None,
        Option(
            help="Instead of --budgets, cache sizes of a stream: 900kB,1.4MB. Each policy gets the "
            "largest budget that fits."
        ),
    ] = None,
    equal: Annotated[
        Equal | None,
        Option(
            help="What is equal for all policies: slots, bytes of the whole cache, or bytes of "
            "keys and values (kv). With bytes or kv and without --memory, every policy gets the "
            "bytes that streaming_llm takes at each budget. [default: bytes with --memory, else "
            "slots]"
        ),
    ] = None,
    seeds: Annotated[str, Option(help="Seeds of all random draws: 0,1,2.")] = "0",
    out: Annotated[
        Path, Option(help="The results file: JSON lines. Its folder is made if missing.")
    ] = Path("results.jsonl"),
    resume: Annotated[
        bool,
        Option("--resume", help="Run the unfinished and failed cells of an existing results file."),
    ] = False,
    add: Annotated[
        bool,
        Option("--add", help="Like --resume, but first add the cells of this command to the file."),
    ] = False,
    protocol: Annotated[
        str | None, Option(help="Read texts as in a paper's experiments; see --list.")
    ] = None,
    chunk: Annotated[
        int | None,
        Option(
            min=1,
            help="Number of new tokens to read before the policy chooses again which tokens to "
            "keep [default: 64, or what the protocol sets]",
        ),
    ] = None,
    positions: options.PositionsName = options.Positions.rolling,
    slots: options.SlotsName = None,
    cluster: Annotated[
        str | None, Option(help="Run on Ray: local, or a cluster's address.")
    ] = None,
    show: Annotated[
        bool, Option("--list", help="List tasks, parameters and protocols, and exit.")
    ] = False,
    compiled: options.Compile = False,
    as_json: options.AsJson = False,
    *,
    loading: Loading,
) -> int:
    """Measure policies on tasks, and save the results to a file.

    A cell is one policy on one task, with one model, budget and seed. After a crash, --resume
    continues. Failed cells do not stop the others; they are reported at the end, with exit code 1.
    """
    from transformers.utils.logging import disable_progress_bar

    from weir.cache import read_bytes
    from weir.evals.grid import extend_grid, make_grid, run
    from weir.evals.results import failures, read_results

    disable_progress_bar()  # weir shows its own bar
    freeze_imports()
    if show:
        _list(as_json)
        return 0
    grid = make_grid(
        [name.strip() for name in model.split(",") if name.strip()],
        tasks,
        policies,
        budgets=_budgets(budgets, protocol, memory),
        memory=[] if memory is None else [read_bytes(word) for word in memory.split(",")],
        equal=None if equal is None else equal.value,
        seeds=options.numbers("--seeds", seeds),
        paper=protocol,
        chunk=chunk,
        positions=positions.value,
        slots=slots,
        loading=loading,
        compiled=compiled,
    )
    if not any(cell.budget for cell in grid.cells):
        unused = ("budgets", "memory", "equal")
        options.say_unused(
            context, unused, "every policy here is written with its budget, or takes none"
        )
    if protocol is not None:
        options.say_unused(context, ("positions",), f"the protocol {protocol} sets the positions")
    if not out.exists():
        options.say_unused(context, ("add", "resume"), f"{out} does not exist yet")
    if add:
        grid = extend_grid(out, grid)
    work: Worker | None = None
    if cluster is not None:
        from weir.evals.grid import on_ray

        work = on_ray(cluster)
    with progress() as bar:
        # Cells differ greatly in duration, so only a long average predicts the rest.
        bar.speed_estimate_period = 24 * 3600
        shown = _Progress(bar, grid, _done(out) if resume or add else set())
        try:
            records = run(
                grid,
                out,
                resume=resume,
                add=add,
                work=work,
                on_progress=shown.running,
                on_record=shown.ended,
            )
        except (KeyboardInterrupt, Terminated):
            done = len(read_results(out)[1])
            all_cells = in_words(len(grid.cells), "cell")
            say(f"{done} of {all_cells} are saved in {out}. Use --resume to continue.")
            raise
    failed = failures(records)
    if as_json:
        print_json(
            {"out": str(out), "cells": len(records), "failed": len(failed), "records": records}
        )
    else:
        _print(records)
        print_line(out)
    if failed:
        say(
            f"weir: {len(failed)} of {in_words(len(records), 'cell')} failed. Use --resume to try "
            "them again."
        )
    return 1 if failed else 0


def _done(out: Path) -> set[int]:
    """Return the cells done in an existing results file."""
    from weir.evals.results import read_results

    if not out.exists() or not out.stat().st_size:
        return set()
    return {record["cell"] for record in read_results(out)[1] if record["status"] == "done"}


class _Progress:
    """Progress bar with a line for each failed cell. Without a terminal, a line for every cell."""

    def __init__(self, bar: Any, grid: Grid, before: set[int]) -> None:
        self.bar = bar
        self.grid = grid
        self.before = before
        self.done: set[int] = set()
        self.shares: dict[int, float] = {}
        self.remaining: RemainingTime | None = None
        self.row = bar.add_task("cells", total=len(grid.cells), note="")

    def running(self, number: int, share: float) -> None:
        if self.remaining is None:
            self.remaining = RemainingTime("the other cells")
        self.shares[number] = share
        self._show(number)

    def ended(self, record: CellRecord) -> None:
        self.done.add(record["cell"])
        self.shares.pop(record["cell"], None)
        if record["status"] == "failed":
            where = f"{record['setting']} of {record['model']} under {record['policy']}"
            say(f"failed: {where}, seed {record['seed']}: {record['reason']}")
        elif in_lines() and record["cell"] not in self.before:
            say(self._line(record))
        if missing := record.get("result", {}).get("missing"):
            some = "; ".join(missing[:5]) + ("; ..." if len(missing) > 5 else "")
            say(f"{record['task']}: left out, because images are missing: {some}")
        self._show(record["cell"])
        if self.remaining is not None and in_lines():
            new = len(self.done - self.before)
            self.remaining.at(max(new, 1) / (len(self.grid.cells) - len(self.before)))

    def _line(self, record: CellRecord) -> str:
        """Describe a finished cell in one line."""
        value, took = record["value"], record["seconds"]
        figure = "" if value is None else f": {record['metric']} {value:.4g}"
        return (
            f"{len(self.done)} of {in_words(len(self.grid.cells), 'cell')}: {record['setting']} of "
            f"{record['model']} under {record['policy']}, "
            f"seed {record['seed']}{figure}, {took:.0f} s"
        )

    def _show(self, number: int) -> None:
        cell = self.grid.cells[number]
        note = f"{cell.task.partition('(')[0]} under {cell.policy}"
        self.bar.update(self.row, completed=len(self.done) + sum(self.shares.values()), note=note)


def _budgets(text: str | None, paper: str | None, memory: str | None) -> list[int]:
    """Return the given budgets, or the default ones if neither memory nor protocol sets a size."""
    from weir.evals.grid import protocol

    if text is not None:
        return options.numbers("--budgets", text, 1)
    if memory is not None:
        return []
    return [] if paper is not None and protocol(paper).rate is not None else list(USUAL)


def _print(records: list[CellRecord]) -> None:
    from rich.text import Text

    from weir.evals.results import by_distance, name_records, overviews

    records = name_records(records)
    for found in [*overviews(records), *by_distance(records)]:
        parts = _fitting(found)
        for number, columns in enumerate(parts, 1):
            table = _table(found, columns)
            if len(parts) > 1:
                table.title = Text(f"{found.title} ({number} of {len(parts)})")
            print_table(table)


def _fitting(found: Figures) -> list[Sequence[Column]]:
    """Split the columns into parts that fit the terminal, with at least one column each."""
    columns = found.columns
    parts: list[Sequence[Column]] = []
    begin = 0
    unwrapped = output().options.update(width=WIDE)
    for end in range(1, len(columns) + 1):
        more = _table(found, columns[begin : end + 1])
        wide = output().measure(more, options=unwrapped).maximum > output().width
        if wide or end == len(columns):
            parts.append(columns[begin:end])
            begin = end
    return parts


def _table(found: Figures, columns: Sequence[Column]) -> Table:
    """Make a table of all policies and some of the columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(found.title), title_justify="left")
    table.add_column("policy", overflow="fold")
    for column in columns:
        # Names wider than the terminal wrap; figures never do.
        widest = max(len(column.written(row, group=",")) for row in range(len(found.rows)))
        table.add_column(Text(column.head), justify="right", min_width=widest)
    places = [column.places() for column in columns]
    styles = {None: "", 1: "bold", 2: "underline"}
    for row, policy in enumerate(found.rows):
        cells = [
            Text(column.written(row, group=","), styles[place.get(row)])
            for column, place in zip(columns, places, strict=True)
        ]
        table.add_row(Text(policy), *cells)
    return table


def _list(as_json: bool) -> None:
    from rich.text import Text

    from weir.evals.grid import PROTOCOLS
    from weir.evals.tasks import TASKS

    found: list[dict[str, Any]] = [
        {
            "name": name,
            "parameters": describe_parameters(kind),
            "about": first_paragraph(kind),
            "metrics": dict(kind.metrics),
        }
        for name, kind in sorted(TASKS.items())
    ]
    papers = [{"name": name, "about": rules.about} for name, rules in PROTOCOLS.items()]
    if as_json:
        print_json({"tasks": found, "protocols": papers})
        return
    output().print(Text("Tasks", style="bold"))
    for row in found:
        output().print(Text(f"  {row['name']}({row['parameters']})", "cyan"), soft_wrap=True)
        output().print(Text(f"      {row['about']}"), soft_wrap=True)
    output().print(Text("\nProtocols", style="bold"))
    for row in papers:
        output().print(Text(f"  {row['name']}", "cyan"))
        output().print(Text(f"      {row['about']}"), soft_wrap=True)
