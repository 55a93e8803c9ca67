"""A name that stands for other pools than it did is two policies to a table: pools say which."""

from __future__ import annotations

from collections.abc import Sequence

from weir.evals.results.file import CellRecord


def told_apart(records: Sequence[CellRecord]) -> list[CellRecord]:
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
        {**it, "policy": it.get("pools") or it["policy"]} if len(meant[it["policy"]]) > 1 else it
        for it in records
    ]
