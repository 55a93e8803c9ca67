"""Records of cells as tables: policies down, what was measured across, seeds averaged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weir.evals.results.figures import Figure, figure_of, largest_of
from weir.evals.results.file import CellRecord, unique

if TYPE_CHECKING:
    from weir.evals.task import Better

CACHE = "cache, MB"
"""The head of the column of bytes."""
FOLDERS = re.compile(r"""\b((?:file|text)=["'])(?!hub:)[^"']*/""")
"""A task's parameter that names a file, up to the file's own name."""

BUDGET = re.compile(r"(?<=\()budget=\d+(?:, )?|, budget=\d+\b")


@dataclass(frozen=True)
class Column:
    """A column of figures.

    Attributes:
        head: what stands above it.
        values: one figure per row; None where there is none.
        better: which way is better; None marks nothing.
        digits: after the point.
        megabytes: the figures are bytes, to be written as MB.
        figures: the same with how sure they are, one per row; empty where nobody knows.
    """

    head: str
    values: tuple[float | None, ...]
    better: Better | None
    digits: int = 3
    megabytes: bool = False
    figures: tuple[Figure | None, ...] = ()

    def sure(self, row: int) -> str:
        """How sure the figure of a row is, as it stands behind it; empty where nobody knows."""
        figure = self.figures[row] if self.figures else None
        if figure is None or figure.low is None or figure.high is None:
            return ""
        low, high = (f"{end:.{self.digits}f}" for end in (figure.low, figure.high))
        spread = "" if figure.sd is None else f"sd {figure.sd:.{self.digits}f}, "
        return f"{low}–{high}, {spread}n {figure.n:,}"

    def places(self) -> dict[int, int]:
        """Of the rows that are best and second best, which they are: 1 or 2.

        Figures that are written alike share a place. What is worst in a column is never marked.
        """
        if self.better is None:
            return {}
        written = {
            row: float(self.written(row)) for row, v in enumerate(self.values) if v is not None
        }
        known = sorted(set(written.values()), reverse=self.better == "higher")[:-1]
        return {row: known.index(v) + 1 for row, v in written.items() if v in known[:2]}

    def written(self, row: int, unknown: str = "–", group: str = "") -> str:
        """The figure of a row as it stands in a table."""
        value = self.values[row]
        if value is None:
            return unknown
        return f"{value / 1e6:{group}.2f}" if self.megabytes else f"{value:{group}.{self.digits}f}"


@dataclass(frozen=True)
class Table:
    """A table with a name for each row.

    Attributes:
        title: what it is.
        rows: the policies.
        columns: the figures.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]


def overviews(records: Sequence[CellRecord]) -> list[Table]:
    """For each model and protocol, every policy's main figure of every setting, and its bytes."""
    done = [record for record in records if record["status"] == "done"]
    tables = []
    for (model, paper), mine in grouped(done, "model", "protocol").items():
        policies = unique(record["policy"] for record in mine)
        settings = grouped(mine, "setting")
        short = heads(list(unique(record["setting"] for record in mine)))
        columns = [
            _column(_head(short[setting], rows[0]), rows, policies, "value", rows[0]["better"])
            for (setting,), rows in settings.items()
        ]
        columns.append(_column(CACHE, mine, policies, "kv_bytes", None, largest=True))
        title = model if paper is None else f"{model}, protocol {paper}"
        tables.append(Table(title, policies, tuple(columns)))
    return tables


def by_distance(records: Sequence[CellRecord]) -> list[Table]:
    """For each model and setting whose results are by distance, the share of right answers."""
    done = [r for r in records if r["status"] == "done" and r["result"].get("by_distance")]
    short = heads(list(unique(record["setting"] for record in done)))
    tables = []
    for (model, setting), mine in grouped(done, "model", "setting").items():
        policies = unique(record["policy"] for record in mine)
        distances = unique(row["distance"] for row in mine[0]["result"]["by_distance"])
        columns = []
        for distance in distances:
            figures = []
            for policy in policies:
                rows = [
                    row
                    for record in mine
                    if record["policy"] == policy
                    for row in record["result"]["by_distance"]
                    if row["distance"] == distance
                ]
                figures.append(Figure.counted(rows))
            values = tuple(None if it is None else it.mean for it in figures)
            head = f"{distance:,}"
            columns.append(Column(head, values, "higher", digits=2, figures=tuple(figures)))
        title = f"{model}: {short[setting]}, by distance"
        tables.append(Table(title, policies, tuple(columns)))
    return tables


def _head(setting: str, record: CellRecord) -> str:
    """The setting, and what is measured where the task has another name."""
    metric = record["metric"]
    named = metric == record["task"] or metric in ("accuracy", "error")
    return setting if named else f"{setting}: {metric.replace('_', ' ')}"


def heads(settings: list[str]) -> dict[str, str]:
    """A short head for each setting: the task's name, and in brackets what tells it from others.

    Files stand there by their names, without folders, unless that would make two heads the same.
    """
    names = {setting: setting.partition("(")[0] for setting in settings}
    found = {}
    for setting, name in names.items():
        rivals = [other for other in settings if names[other] == name and other != setting]
        mine = _parameters(setting)
        told = [p for p in mine if any(p not in _parameters(other) for other in rivals)]
        found[setting] = f"{name}({', '.join(told)})" if told else name
    short = {setting: FOLDERS.sub(r"\1", head) for setting, head in found.items()}
    times = Counter(short.values())
    return {s: short[s] if times[short[s]] == 1 else head for s, head in found.items()}


def without_budget(policy: str) -> str:
    """A policy as it was before a budget was put into it: `quantized(h2o, newest=4)`."""
    return BUDGET.sub("", policy).replace("()", "")


def grouped(records: Iterable[CellRecord], *keys: str) -> dict[tuple[Any, ...], list[CellRecord]]:
    """Records that agree in some fields, in the order they first come."""
    found: dict[tuple[Any, ...], list[CellRecord]] = {}
    for record in records:
        found.setdefault(tuple(record[key] for key in keys), []).append(record)
    return found


def _column(
    head: str,
    records: list[CellRecord],
    policies: Sequence[str],
    field: str,
    better: Better | None,
    *,
    largest: bool = False,
) -> Column:
    summed = largest_of if largest else figure_of
    figures = [summed([r for r in records if r["policy"] == policy], field) for policy in policies]
    values = [None if figure is None else figure.mean for figure in figures]
    most = max((abs(value) for value in values if value is not None), default=0.0)
    digits = 3 if most <= 1 else 1 if most >= 10 else 2
    megabytes = field == "kv_bytes"
    return Column(head, tuple(values), better, digits, megabytes, tuple(figures))


def _parameters(setting: str) -> list[str]:
    return setting.partition("(")[2].removesuffix(")").split(", ")
