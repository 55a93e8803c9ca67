"""A grid that grows: the cells of a results file, and behind them those that are new."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from weir.errors import WeirError
from weir.evals.grid.grid import Cell, Grid
from weir.evals.results import read_results


def grown(path: Path, grid: Grid) -> Grid:
    """The grid of a results file with the cells of another behind its own, each once.

    What is in the file keeps its number, so its records stay as they are. Where there is no file
    yet the grid is as it was given.

    Args:
        path: the results file.
        grid: what is to be measured too.

    Raises:
        WeirError: it is no results file, or one whose cells this version of weir cannot read.
    """
    if not path.exists() or not path.stat().st_size:
        return grid
    known = {field.name for field in fields(Cell)}
    there = read_results(path)[0]["cells"]
    if any(set(cell) - known for cell in there):
        raise WeirError(f"{path} was written by another version of weir; name another file")
    try:
        old = tuple(Cell.of(cell) for cell in there)
        hash(old)
    except (TypeError, ValueError):
        raise WeirError(f"{path} has cells that lack a field; name another file") from None
    if any(map(_runs_code, old)) and not any(map(_runs_code, grid.cells)):
        raise WeirError(
            f"{path} has cells whose models bring Python code of their own; give "
            "--trust-remote-code to run it, and read it first"
        )
    return Grid((*old, *(cell for cell in grid.cells if cell not in set(old))))


def _runs_code(cell: Cell) -> bool:
    """Whether a cell's model is loaded with Python code that it brings."""
    return bool(dict(cell.loading).get("trust_remote_code"))
