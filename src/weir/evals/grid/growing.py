"""A grid beside a results file that is there: what it has already, and what is new.

Files from before cells said what pools their policies stand for are read like all others: such a
cell is the same as one of the same name, here and where several files are read as one
(`results.several`).
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

from weir.errors import WeirError
from weir.evals.grid.grid import Cell, Grid, pools_of
from weir.evals.results import read_results


def grown(path: Path, grid: Grid) -> Grid:
    """The grid of a results file with the cells of another behind its own, each once.

    What is in the file keeps its number, so its records stay as they are. Where there is no file
    yet the grid is as it was given. A policy whose name stands for other pools than it did is
    another one.

    Args:
        path: the results file.
        grid: what is to be measured too.

    Raises:
        WeirError: it is no results file, or one whose cells this version of weir cannot read.
    """
    old = _cells_in(path)
    if any(map(_runs_code, old)) and not any(map(_runs_code, grid.cells)):
        raise WeirError(
            f"{path} has cells whose models bring Python code of their own; give "
            "--trust-remote-code to run it, and read it first"
        )
    there = set(old)
    return Grid((*old, *(cell for cell in grid.cells if not {cell, _unsaid(cell)} & there)))


def resumed(path: Path, grid: Grid) -> Grid:
    """The grid as a results file has it, if it is the same but for pools that the file lacks.

    What is wrong with the file is left to who opens it to write.

    Args:
        path: the results file.
        grid: what is to go on.
    """
    try:
        old = _cells_in(path)
    except WeirError:
        return grid
    same = len(old) == len(grid.cells) and all(
        there in (cell, _unsaid(cell)) for there, cell in zip(old, grid.cells, strict=True)
    )
    return Grid(old) if same else grid


def untold(grid: Grid) -> int:
    """How many cells do not say what pools the name of their policy stands for."""
    return sum(cell.pools is None and pools_of(cell.policy) is not None for cell in grid.cells)


def _unsaid(cell: Cell) -> Cell:
    """The cell as files had it before they said what a policy stands for."""
    return replace(cell, pools=None)


def _cells_in(path: Path) -> tuple[Cell, ...]:
    """The cells of a results file's grid; none where there is no file yet.

    Raises:
        WeirError: it is no results file, or one whose cells this version of weir cannot read.
    """
    if not path.exists() or (path.is_file() and not path.stat().st_size):
        return ()
    known = {field.name for field in fields(Cell)}
    there = read_results(path)[0]["cells"]
    if any(set(cell) - known for cell in there):
        raise WeirError(f"{path} was written by another version of weir; name another file")
    try:
        old = tuple(Cell.of(cell) for cell in there)
        hash(old)
    except (TypeError, ValueError):
        raise WeirError(f"{path} has cells that lack a field; name another file") from None
    return old


def _runs_code(cell: Cell) -> bool:
    """Whether a cell's model is loaded with Python code that it brings."""
    return bool(dict(cell.loading).get("trust_remote_code"))
