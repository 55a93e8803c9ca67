"""What the lines of a results file must hold, so that whoever reads them can rely on it.

A line that is JSON and yet damaged is named by file, line and field. Knows nothing about models or
tasks: of what a task found, only what tables and plots draw is looked at.
"""

from __future__ import annotations

from typing import Any

from weir.evals.data import Record


def check_grid(line: Record) -> int:
    """Look at the first line; how many cells the grid has.

    Raises:
        WeirError: a field is missing or of another kind.
    """
    line.text("grid")
    return len(line.records("cells"))


def check_cell(line: Record, cells: int) -> None:
    """Look at the record of a cell.

    Raises:
        WeirError: a field is missing or of another kind, or the grid has no such cell.
    """
    number = line.count("cell")
    if not 0 <= number < cells:
        raise line.wrong("cell", f"must be one of the grid's {cells} cells, not {number}")
    for name in ("model", "setting", "policy", "weir"):
        line.text(name)
    line.count("seed")
    status = _one_of(line, "status", ("done", "failed"))
    if status == "failed":
        line.text("reason")
        return
    for name in ("task", "metric"):
        line.text(name)
    if "protocol" not in line or line.values["protocol"] is not None:
        line.text("protocol")
    _one_of(line, "better", ("higher", "lower"))
    for name in ("value", "kv_bytes"):
        line.number(name)
    if "positions" in line:
        line.text("positions")
    for name in ("chunk", "budget", "memory"):
        if line.values.get(name) is not None:
            line.count(name)
    if "pools" in line:
        line.text("pools")
    if "loading" in line:
        line.record("loading")
    if "compiled" in line:
        line.flag("compiled")
    _check_result(line.record("result"))


def _check_result(result: Record) -> None:
    """Look at what is drawn: blocks of a text, answers by distance, the cells of a heat map."""
    if "ppl_by_block" in result:
        result.numbers("ppl_by_block")
        for name in ("block", "tokens"):
            result.count(name)
    if "by_distance" in result:
        for row in result.records("by_distance"):
            for name in ("distance", "asked", "right"):
                row.count(name)
    if "cells" in result:
        for cell in result.records("cells"):
            cell.count("length")
            for name in ("depth", "accuracy"):
                cell.number(name, known=True)


def _one_of(line: Record, name: str, words: tuple[str, ...]) -> Any:
    value = line.text(name)
    if value not in words:
        raise line.wrong(name, f"must be {' or '.join(words)}, not {value!r}")
    return value
