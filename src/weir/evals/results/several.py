"""Several results files as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weir.errors import WeirError
from weir.evals.results.file import CellRecord, read_results
from weir.evals.results.lists import named_shortly
from weir.evals.results.pools import told_apart
from weir.evals.results.ways import as_loaded

DECIDING = ("model", "setting", "policy", "seed", "protocol", "chunk", "positions")
"""What tells one measurement from another, with the pools that a policy stands for."""


def read_together(paths: Sequence[Path]) -> tuple[int, list[CellRecord]]:
    """How many cells the grids of some files have, and their records, what is in two of them once.

    Models are named with how they were loaded, policies for each layer by their slots, and those
    whose name stands for several by their pools. Of a cell
    that failed in one file and is done in another, what is done counts.

    Args:
        paths: the files; what stands in the first comes first.

    Raises:
        WeirError: one is no results file, or two have other figures of the same cell.
    """
    cells = 0
    found: dict[tuple[Any, ...], list[tuple[CellRecord, Path]]] = {}
    for path in paths:
        grid, records = read_results(path)
        cells += len(grid["cells"])
        for record in as_loaded(records):
            named = found.setdefault(tuple(record.get(name) for name in DECIDING), [])
            place = _same(record, [there for there, _ in named])
            if place is None:
                named.append((record, path))
                continue
            cells -= 1
            there, where = named[place]
            if there["status"] == "failed":
                named[place] = record, path
            elif record["status"] == "done" and record["value"] != there["value"]:
                raise WeirError(
                    f"{where} and {path} contradict each other: {record['setting']} of "
                    f"{record['model']} under {record['policy']}, seed {record['seed']}, is "
                    f"{there['value']} in one and {record['value']} in the other; report them "
                    "apart, or leave one out"
                )
    return cells, named_shortly(
        told_apart([record for named in found.values() for record, _ in named])
    )


def _same(record: CellRecord, others: Sequence[CellRecord]) -> int | None:
    """Which of some records of the same name is of the same cell, if one is.

    Files from before cells said what their policy stands for have no pools: such a cell is the same
    as one of the same name, as it is to a grid that grows.
    """
    pools = record.get("pools")
    said = [other.get("pools") for other in others]
    fits = [place for place, its in enumerate(said) if None in (pools, its) or pools == its]
    return min(fits, key=lambda place: said[place] != pools, default=None)
