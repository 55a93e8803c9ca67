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

DECIDING = ("model", "setting", "policy", "seed", "protocol", "chunk", "positions", "pools")
"""What tells one measurement from another."""


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
    found: dict[tuple[Any, ...], tuple[CellRecord, Path]] = {}
    for path in paths:
        grid, records = read_results(path)
        cells += len(grid["cells"])
        for record in as_loaded(records):
            key = tuple(record.get(name) for name in DECIDING)
            if key not in found:
                found[key] = record, path
                continue
            cells -= 1
            there, where = found[key]
            if there["status"] == "failed":
                found[key] = record, path
            elif record["status"] == "done" and record["value"] != there["value"]:
                raise WeirError(
                    f"{where} and {path} contradict each other: {record['setting']} of "
                    f"{record['model']} under {record['policy']}, seed {record['seed']}, is "
                    f"{there['value']} in one and {record['value']} in the other; report them "
                    "apart, or leave one out"
                )
    return cells, named_shortly(told_apart([record for record, _ in found.values()]))
