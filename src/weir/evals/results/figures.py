"""A figure of a table with how sure it is: mean, standard deviation, 95 % interval and n.

Shares of right answers are counted, over all seeds together, and have Wilson's interval; whatever
else was measured with several seeds has Student's. What was measured once has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any


@dataclass(frozen=True)
class Figure:
    """What some measurements of one thing come to.

    Attributes:
        mean: of the seeds.
        n: answers that were counted, or seeds where none were.
        seeds: how many there were.
        sd: standard deviation over the seeds; None of one.
        low, high: the 95 % interval; None where one figure is all there is.
    """

    mean: float
    n: int
    seeds: int
    sd: float | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """Of a figure a seed."""
        from weir.evals.measures import around_mean  # which imports PyTorch, and lists cannot wait

        middle, reach = around_mean(values)
        ends = (None, None) if reach is None else (middle - reach, middle + reach)
        return cls(middle, len(values), len(values), _spread(values), *ends)

    @classmethod
    def counted(cls, rows: Sequence[Any]) -> Figure | None:
        """Of answers that were counted, a row with "right" and "asked" a seed; None of none."""
        from weir.evals.measures import counted

        asked = sum(row["asked"] for row in rows)
        if not asked:
            return None
        right = sum(row["right"] for row in rows)
        shares = [row["right"] / row["asked"] for row in rows if row["asked"]]
        sure = counted(right, asked)
        return cls(right / asked, asked, len(shares), _spread(shares), sure["low"], sure["high"])


def figure_of(records: Sequence[dict[str, Any]], field: str) -> Figure | None:
    """A field of the records of one policy and setting, one a seed; None where none has it."""
    known = [record for record in records if record[field] is not None]
    if not known:
        return None
    results = [record["result"] for record in known]
    if field == "value" and all(_is_share(record) for record in known):
        return Figure.counted(results)
    return Figure.of([record[field] for record in known])


def _is_share(record: dict[str, Any]) -> bool:
    """Whether a record's main figure is the share of right answers that it has counted."""
    result = record["result"]
    right, asked = result.get("right"), result.get("asked")
    return bool(
        type(right) is int and type(asked) is int and asked and record["value"] == right / asked
    )


def _spread(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


def largest_of(records: Sequence[dict[str, Any]], field: str) -> Figure | None:
    """The largest of a field; its seeds and n are those of the records."""
    values = [record[field] for record in records if record[field] is not None]
    if not values:
        return None
    return Figure(max(values), len(values), len(values))
