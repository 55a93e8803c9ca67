"""Several results files as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    found: dict[tuple[Any, ...], list[_Found]] = {}
    for path in paths:
        grid, records = read_results(path)
        cells += len(grid["cells"])
        for record in as_loaded(records):
            key = tuple(record.get(name) for name in DECIDING)
            found.setdefault(key, []).append(_Found(record, path))
    merged = [_merged(same) for same in found.values()]
    cells -= sum(map(len, found.values())) - sum(map(len, merged))
    return cells, named_shortly(told_apart([it.record for same in merged for it in same]))


@dataclass
class _Found:
    """A record, and the file that it stands in."""

    record: CellRecord
    path: Path


def _merged(same: Sequence[_Found]) -> list[_Found]:
    """Records of cells of one name, each cell once, in the order they come.

    Files from before cells said what their policy stands for have no pools: such a cell is the same
    as one of the same name, as it is to a grid that grows; of several, one that has its figure.

    Raises:
        WeirError: two have other figures of the same cell.
    """
    kept: dict[int, _Found] = {}  # by where a cell comes first
    # Those without pools last, when it is known which cells there are.
    order = sorted(range(len(same)), key=lambda place: same[place].record.get("pools") is None)
    for place in order:
        record = same[place].record
        pools, value = record.get("pools"), record.get("value")
        fits = {at: it.record for at, it in kept.items() if pools in (None, it.record.get("pools"))}
        at = min(fits, key=lambda at: fits[at].get("value") != value, default=None)
        if at is None:
            kept[place] = same[place]
            continue
        whole = _one_of(kept.pop(at), same[place])
        kept[min(at, place)] = whole
    return [kept[place] for place in sorted(kept)]


def _one_of(there: _Found, here: _Found) -> _Found:
    """What is known of a cell by two records: of one that failed and one that is done, the latter.

    Raises:
        WeirError: both are done, with other figures.
    """
    old, new = there.record, here.record
    if old["status"] == "failed":
        return _Found({**new, "pools": old.get("pools") or new.get("pools")}, here.path)
    if new["status"] == "done" and new["value"] != old["value"]:
        raise WeirError(
            f"{there.path} and {here.path} contradict each other: {new['setting']} of "
            f"{new['model']} under {new['policy']}, seed {new['seed']}, is {old['value']} in one "
            f"and {new['value']} in the other; report them apart, or leave one out"
        )
    return there
