"""A policy for each layer fills a page: tables and pictures name it by the slots of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weir.evals.results.file import CellRecord, unique


def named_shortly(records: Sequence[CellRecord]) -> list[CellRecord]:
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
