"""Names of models and policies in tables, and several results files read as one.

A model that was loaded in two ways is two models to a table, and a policy's name that stood for
other pools is another policy; their names say so. A policy for each layer, which would fill a page,
goes by its slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weir.errors import WeirError
from weir.evals.results.file import CellRecord, read_results, unique

DEFAULTS = {"dtype": "auto"}
"""Of the arguments of `weir.load`, those whose default has a value; given it, nothing is said."""


def name_records(records: Sequence[CellRecord]) -> list[CellRecord]:
    """Records with the names that tables and pictures give their models and policies.

    Args:
        records: of cells, as they stand in a results file.
    """
    return shorten_layered(distinguish_pools(name_loading(records)))


def name_loading(records: Sequence[CellRecord]) -> list[CellRecord]:
    """Records whose model is named with how it was loaded: `nano (dtype bfloat16)`.

    A model that was loaded the usual way keeps its name, and so does one of these records. `loaded`
    has the model's own name, by which it is one model still.

    Args:
        records: of cells, as they stand in a results file.
    """
    named = []
    for record in records:
        rest = {key: value for key, value in record.items() if key not in ("loading", "compiled")}
        options = {**(record.get("loading") or {}), "compiled": record.get("compiled")}
        model, how = record["model"], _describe_loading(options)
        named.append({**rest, "model": model + how, "loaded": rest.get("loaded", model)})
    return named


def _describe_loading(loading: Mapping[str, Any]) -> str:
    """The arguments that differ from the default, in brackets after a space."""
    words = [
        name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}"
        for name, value in sorted(loading.items())
        if value and value != DEFAULTS.get(name)
    ]
    return f" ({', '.join(words)})" if words else ""


def shorten_layered(records: Sequence[CellRecord]) -> list[CellRecord]:
    """Records in which a policy for each layer goes by its slots: `layers of 76, 52, 436, 220`.

    Two lists that would be called alike keep their full text, as all other policies do, and as the
    results file has it of all. `written` has it of these records too.

    Args:
        records: of cells, as they stand in a results file.
    """
    lists = [policy for policy in unique(r["policy"] for r in records) if policy.startswith("[")]
    short = {policy: _slots(policy) for policy in lists}
    times = Counter(short.values())
    names = {policy: name for policy, name in short.items() if times[name] == 1}
    return [
        {**r, "policy": names[r["policy"]], "written": r["policy"]} if r["policy"] in names else r
        for r in records
    ]


def _slots(policy: str) -> str:
    """The name of a list; the list itself where it is not one that this weir can read."""
    # Which imports PyTorch, and reports without such a policy do not wait for it.
    from weir.errors import WeirError
    from weir.policies import Layered, saved_policy

    try:
        read = saved_policy(policy)
    except WeirError:
        return policy
    if not isinstance(read, Layered):
        return policy
    slots = ["all" if pipe.slots is None else str(pipe.slots) for pipe in read.pipes]
    return f"layers of {', '.join(slots)}"


def distinguish_pools(records: Sequence[CellRecord]) -> list[CellRecord]:
    """Records in which a policy goes by its pools, where its name stands for several.

    Those that do not say what their policy stood for keep its name, and are no other than the rest.

    Args:
        records: of cells, as they stand in a results file.
    """
    meant: dict[str, set[str]] = {}
    for record in records:
        pools = record.get("pools")
        meant.setdefault(record["policy"], set()).update([] if pools is None else [pools])
    return [
        {**one, "policy": one.get("pools") or one["policy"]}
        if len(meant[one["policy"]]) > 1
        else one
        for one in records
    ]


DECIDING = ("model", "setting", "policy", "seed", "protocol", "chunk", "positions")
"""What tells one measurement from another, with the pools that a policy stands for."""


def read_together(paths: Sequence[Path]) -> tuple[int, list[CellRecord]]:
    """Read several results files as one: the number of cells, and the records, duplicates once.

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
        for record in name_loading(records):
            key = tuple(record.get(name) for name in DECIDING)
            found.setdefault(key, []).append(_Found(record, path))
    merged = [_merge_records(same) for same in found.values()]
    cells -= sum(map(len, found.values())) - sum(map(len, merged))
    return cells, name_records([one.record for same in merged for one in same])


@dataclass
class _Found:
    """A record, and the file that it stands in."""

    record: CellRecord
    path: Path


def _merge_records(same: Sequence[_Found]) -> list[_Found]:
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
        fits = {
            at: one.record for at, one in kept.items() if pools in (None, one.record.get("pools"))
        }
        at = min(fits, key=lambda at: fits[at].get("value") != value, default=None)
        if at is None:
            kept[place] = same[place]
            continue
        whole = _merge_pair(kept.pop(at), same[place])
        kept[min(at, place)] = whole
    return [kept[place] for place in sorted(kept)]


def _merge_pair(there: _Found, here: _Found) -> _Found:
    """Merge two records of a cell: one that is done replaces one that failed.

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
