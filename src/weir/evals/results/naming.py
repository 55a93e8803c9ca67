"""Names of models and policies in tables, and several results files read as one.

A model loaded in two ways counts as two models. If a policy's name stands for different pools in
different records, it counts as several policies. Displayed names tell them apart. A policy with one
pipe per layer, which would fill a page, is named by its slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weir.errors import WeirError
from weir.evals.results.file import CellRecord, read_results, unique

DEFAULTS = {"dtype": "auto"}
"""Arguments of `weir.load` whose default is not None. Names do not mention defaults."""


def name_records(records: Sequence[CellRecord]) -> list[CellRecord]:
    """Rename models and policies in records for tables and pictures."""
    return shorten_layered(distinguish_pools(name_loading(records)))


def name_loading(records: Sequence[CellRecord]) -> list[CellRecord]:
    """Add loading arguments to the model names of records: `nano (dtype bfloat16)`.

    The field `loaded` has the original name, which is the same however the model was loaded.
    """
    named = []
    for record in records:
        rest = {key: value for key, value in record.items() if key not in ("loading", "compiled")}
        options = {**(record.get("loading") or {}), "compiled": record.get("compiled")}
        words = [
            name.replace("_", " ") + ("" if value is True else f" {value}")
            for name, value in sorted(options.items())
            if value and value != DEFAULTS.get(name)
        ]
        model, how = record["model"], f" ({', '.join(words)})" if words else ""
        named.append({**rest, "model": model + how, "loaded": rest.get("loaded", model)})
    return named


def shorten_layered(records: Sequence[CellRecord]) -> list[CellRecord]:
    """Rename per-layer policies of records by their slots: `layers of 76, 52, 436, 220`.

    Two policies that would get the same name keep their full text. For the others, the field
    `written` has the full text.
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
    """Return the short name of a per-layer policy, or its text if this version of weir cannot parse
    it.
    """
    # Imported here, because this imports PyTorch, which reports without such a policy do not need.
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
    """If one policy name stands for different pools in some records, rename these policies by their
    pools, if the records have them.
    """
    meant: dict[str, set[str]] = {}
    for record in records:
        pools = _stands_for(record)
        meant.setdefault(record["policy"], set()).update([] if pools is None else [pools])
    return [
        {**one, "policy": _stands_for(one) or one["policy"]}
        if len(meant[one["policy"]]) > 1
        else one
        for one in records
    ]


def _stands_for(record: CellRecord) -> str | None:
    """Return the pools that the name of a record's policy stands for; None if the record does not
    say.

    A record without "stands_for" has them under "pools".
    """
    found: str | None = record.get("stands_for", record.get("pools"))
    return found


DECIDING = ("model", "setting", "policy", "seed", "protocol", "chunk", "positions")
"""Fields that distinguish measurements, together with the pools that a policy's name stands for."""


def read_together(paths: Sequence[Path]) -> tuple[int, list[CellRecord]]:
    """Read several results files as one. Returns the number of cells, and their renamed records.

    A cell that failed in one file and is done in another counts as done. Raises WeirError if two
    files have different figures for one cell.
    """
    cells = 0
    found: dict[tuple[Any, ...], Found] = {}
    for path in paths:
        grid, records = read_results(path)
        cells += len(grid["cells"])
        for record in name_loading(records):
            key = (*(record.get(name) for name in DECIDING), _stands_for(record))
            cells -= key in found
            found[key] = _merge_pair(found[key], (record, path)) if key in found else (record, path)
    return cells, name_records([record for record, _ in found.values()])


Found = tuple[CellRecord, Path]
"""A record, and the file it was read from."""


def _merge_pair(there: Found, here: Found) -> Found:
    """Merge two records of a cell; one that is done replaces one that failed."""
    old, new = there[0], here[0]
    if old["status"] == "failed":
        return here
    if new["status"] == "done" and new["value"] != old["value"]:
        raise WeirError(
            f"{there[1]} and {here[1]} contradict each other: {new['setting']} of {new['model']} "
            f"under {new['policy']}, seed {new['seed']}, is {old['value']} in one and "
            f"{new['value']} in the other. Report them separately, or leave one out."
        )
    return there
