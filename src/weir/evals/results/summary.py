"""Summarizes cell records as tables with one row per policy and one column per task; seeds are
averaged.

Shares of right answers are counted over all seeds together, with Wilson's interval. Other figures
with several seeds have Student's interval. A perplexity that was measured once has Student's
interval over the blocks of its text. Two policies are compared block by block, or answer by answer,
because blocks and questions differ more than policies do. Over several models, only the change
relative to StreamingLLM is averaged, because models differ more than policies do.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, log
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from weir.errors import PolicyError
from weir.evals.results.file import CellRecord, unique
from weir.evals.scores import count_right, mean_interval, paired_shares
from weir.policies import parse_call

if TYPE_CHECKING:
    from weir.evals.task import Better


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds, pairs or models, and its uncertainty.

    Attributes:
        mean: the mean; for counted answers, the share of all answers that are right.
        n: number of values that the interval is based on: answers if they are counted, blocks of
            the text for one perplexity, and otherwise the averaged figures.
        seeds: number of seeds, or of pairs or models if those are averaged.
        sd: standard deviation over the seeds or models; None where it is not computed.
        low, high: the 95 % interval; None where there is none, as for a single figure.
    """

    mean: float
    n: int
    seeds: int
    sd: float | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Make the estimate from one figure for each seed."""
        middle, reach = mean_interval(values)
        ends = (None, None) if reach is None else (middle - reach, middle + reach)
        return cls(middle, len(values), len(values), _spread(values), *ends)

    @classmethod
    def of_blocks(cls, value: float, losses: Sequence[float]) -> Estimate:
        """Estimate a perplexity from the mean losses of a text's blocks, in nats."""
        reach = mean_interval(losses)[1] or 0.0
        return cls(value, len(losses), 1, None, value * exp(-reach), value * exp(reach))

    @classmethod
    def of_counts(cls, rows: Sequence[Any]) -> Estimate | None:
        """Make the estimate from rows of counted answers, "right" and "asked"; None if there are
        none.
        """
        asked = sum(row["asked"] for row in rows)
        if not asked:
            return None
        right = sum(row["right"] for row in rows)
        shares = [row["right"] / row["asked"] for row in rows if row["asked"]]
        sure = count_right(right, asked)
        return cls(right / asked, asked, len(shares), _spread(shares), sure["low"], sure["high"])


def estimate_of(records: Sequence[dict[str, Any]], field: str) -> Estimate | None:
    """Estimate a field from records of one policy and setting, one per seed; None if missing."""
    known = [record for record in records if record[field] is not None]
    if not known:
        return None
    if field == "value" and all(map(_is_share, known)):
        return Estimate.of_counts([record["result"] for record in known])
    if field == "value" and len(known) == 1 and (losses := block_losses(known[0])):
        return Estimate.of_blocks(known[0]["value"], losses)
    return Estimate.of([record[field] for record in known])


def _is_share(record: dict[str, Any]) -> bool:
    """Whether a record's main figure is its share of right answers."""
    result = record["result"]
    right, asked = result.get("right"), result.get("asked")
    return bool(
        type(right) is int and type(asked) is int and asked and record["value"] == right / asked
    )


def block_losses(record: CellRecord) -> list[float]:
    """Return the mean losses of the whole blocks of a text, in nats.

    Empty if the record's main figure is not a perplexity by blocks, if the perplexity of some block
    is not finite, or if there are fewer than `LEAST_BLOCKS`.
    """
    result = record["result"]
    blocks = result.get("ppl_by_block") if record["metric"] == "ppl" else None
    if not blocks:
        return []
    whole = blocks[: result["tokens"] // result["block"]]
    return [log(ppl) for ppl in whole] if all(whole) and len(whole) >= LEAST_BLOCKS else []


def book_losses(record: CellRecord) -> list[float]:
    """Return the mean losses of the books of a text, in nats; empty if there are none, or if the
    perplexity of some book is not finite.
    """
    books = record["result"].get("by_book") if record["metric"] == "ppl" else None
    found = [book["ppl"] for book in books or ()]
    return [log(ppl) for ppl in found] if all(found) else []


def _spread(values: Sequence[float]) -> float | None:
    return stdev(values) if len(values) > 1 else None


LEAST_BLOCKS = 5
"""Smallest number of blocks of a text that gives an interval."""
CACHE = "cache, MB"
"""The head of the column of bytes."""
FOLDERS = re.compile(r"""\b((?:file|text)=["'])(?!hub:)[^"']*/""")
"""A task's parameter that names a file, up to the file's name."""

BUDGET = re.compile(r"(?<=\()budget=\d+(?:, )?|, budget=\d+\b")


@dataclass(frozen=True)
class Column:
    """A column of figures.

    Attributes:
        head: the heading.
        figures: one per row, None if missing.
        better: whether higher or lower is better; with None, nothing is marked.
        digits: digits after the decimal point.
        megabytes: whether figures are bytes, to be shown as MB.
    """

    head: str
    figures: tuple[Estimate | None, ...]
    better: Better | None
    digits: int = 3
    megabytes: bool = False

    @property
    def values(self) -> tuple[float | None, ...]:
        """The means of the figures."""
        return tuple(None if figure is None else figure.mean for figure in self.figures)

    def sure(self, row: int) -> str:
        """Format the interval, deviation and n of a row; empty if there are none."""
        figure = self.figures[row]
        if figure is None or figure.low is None or figure.high is None:
            return ""
        low, high = (f"{end:.{self.digits}f}" for end in (figure.low, figure.high))
        spread = "" if figure.sd is None else f"sd {figure.sd:.{self.digits}f}, "
        return f"{low} to {high}, {spread}n {figure.n:,}"

    def places(self) -> dict[int, int]:
        """Return the rank (1 or 2) of the best and second-best rows, by row.

        Figures with the same text share a rank. The worst figure of a column is never marked.
        """
        if self.better is None:
            return {}
        written = {row: float(self.written(row)) for row, one in enumerate(self.figures) if one}
        known = sorted(set(written.values()), reverse=self.better == "higher")[:-1]
        return {row: known.index(v) + 1 for row, v in written.items() if v in known[:2]}

    def written(self, row: int, unknown: str = "–", group: str = "") -> str:
        """Format the figure of a row for a table."""
        value = self.values[row]
        if value is None:
            return unknown
        return f"{value / 1e6:{group}.2f}" if self.megabytes else f"{value:{group}.{self.digits}f}"


class FigureTable(NamedTuple):
    """A table with a name for each row."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[Column, ...]


def overviews(records: Sequence[CellRecord]) -> list[FigureTable]:
    """One table per model and protocol: every policy's main figure by setting, and its bytes."""
    done = [record for record in records if record["status"] == "done"]
    tables = []
    for (model, paper), mine in group_by(done, "model", "protocol").items():
        policies = unique(record["policy"] for record in mine)
        settings = group_by(mine, "setting")
        short = short_heads(list(unique(record["setting"] for record in mine)))
        columns = [
            _column(_head(short[setting], rows[0]), rows, policies)
            for (setting,), rows in settings.items()
        ]
        columns.append(_bytes_column(mine, policies))
        title = model if paper is None else f"{model}, protocol {paper}"
        tables.append(FigureTable(title, policies, tuple(columns)))
    return tables


def by_distance(records: Sequence[CellRecord]) -> list[FigureTable]:
    """One table per model and setting with results by distance: shares of right answers."""
    done = [r for r in records if r["status"] == "done" and r["result"].get("by_distance")]
    short = short_heads(list(unique(record["setting"] for record in done)))
    tables = []
    for (model, setting), mine in group_by(done, "model", "setting").items():
        policies = unique(record["policy"] for record in mine)
        distances = unique(row["distance"] for row in mine[0]["result"]["by_distance"])
        columns = []
        for distance in distances:
            counts: dict[str, list[CellRecord]] = {policy: [] for policy in policies}
            for record in mine:
                rows = record["result"]["by_distance"]
                counts[record["policy"]] += [row for row in rows if row["distance"] == distance]
            figures = map(Estimate.of_counts, counts.values())
            columns.append(Column(f"{distance:,}", tuple(figures), "higher", digits=2))
        title = f"{model}: {short[setting]}, by distance"
        tables.append(FigureTable(title, policies, tuple(columns)))
    return tables


def _head(setting: str, record: CellRecord) -> str:
    """Return the setting, with the name of the figure if it differs from the task's."""
    metric = record["metric"]
    named = metric == record["task"] or metric in ("accuracy", "error")
    return setting if named else f"{setting}: {metric.replace('_', ' ')}"


def short_heads(settings: list[str]) -> dict[str, str]:
    """Return short headings by setting: the task's name, and in parentheses what distinguishes it.

    Files appear without folders, unless that would make two headings equal.
    """
    names = {setting: setting.partition("(")[0] for setting in settings}
    found = {}
    for setting, name in names.items():
        rivals = [other for other in settings if names[other] == name and other != setting]
        mine = _parameters(setting)
        apart = [p for p in mine if any(p not in _parameters(other) for other in rivals)]
        found[setting] = f"{name}({', '.join(apart)})" if apart else name
    short = {setting: FOLDERS.sub(r"\1", head) for setting, head in found.items()}
    times = Counter(short.values())
    return {s: short[s] if times[short[s]] == 1 else head for s, head in found.items()}


def strip_budget(policy: str) -> str:
    """Return a policy without its budget, such as `quantized(h2o, newest=4)`. The budget can be
    written without its name, as in `h2o(64)`, and can belong to an inner policy.
    """
    try:
        call = parse_call(policy)
    except PolicyError:
        call = None
    if call is not None and "budget" in call.given:
        policy = str(call)
    elif call is not None:
        for inner in (value for value in call.given.values() if isinstance(value, str)):
            policy = policy.replace(inner, strip_budget(inner))
    return BUDGET.sub("", policy).replace("()", "")


def group_by(records: Iterable[CellRecord], *keys: str) -> dict[tuple[Any, ...], list[CellRecord]]:
    """Group records by some fields, in order of first occurrence."""
    found: dict[tuple[Any, ...], list[CellRecord]] = {}
    for record in records:
        found.setdefault(tuple(record[key] for key in keys), []).append(record)
    return found


def _column(head: str, records: list[CellRecord], policies: Sequence[str]) -> Column:
    """The main figure of each policy."""
    figures = tuple(
        estimate_of([r for r in records if r["policy"] == policy], "value") for policy in policies
    )
    most = max((abs(figure.mean) for figure in figures if figure), default=0.0)
    digits = 3 if most <= 1 else 1 if most >= 10 else 2
    return Column(head, figures, records[0]["better"], digits)


def _bytes_column(records: list[CellRecord], policies: Sequence[str]) -> Column:
    """The largest cache of each policy; its seeds and n are those of the records."""
    figures = []
    for policy in policies:
        known = [r["kv_bytes"] for r in records if r["policy"] == policy]
        mine = [nbytes for nbytes in known if nbytes is not None]
        figures.append(Estimate(max(mine), len(mine), len(mine)) if mine else None)
    return Column(CACHE, tuple(figures), None, megabytes=True)


def _parameters(setting: str) -> list[str]:
    return setting.partition("(")[2].removesuffix(")").split(", ")


REFERENCE = "streaming_llm"
"""The policy that all others are compared with."""


Place = tuple[str, str, tuple[Any, ...]]
"""The key of a comparison of policies: a model without the arguments it was loaded with; a setting;
and how a cell was run: the model with those arguments, `chunk`, `positions` and the size.
"""


def paired(records: Sequence[CellRecord]) -> list[FigureTable]:
    """One table per model and protocol: each policy's difference from StreamingLLM, pair by pair.

    Perplexities are paired by blocks of the text, answers by questions, and other figures by seeds.
    With several books there is a column that pairs by books. A policy is compared with `REFERENCE`
    at the same bytes or slots, or with the only reference there is. Figures for which lower is
    better are ratios, and the others are differences. No figure is marked as best, because the best
    of these can be worse than the reference.
    """
    done = [r for r in records if r["status"] == "done" and r["value"] is not None]
    tables = []
    for (model, paper), mine in group_by(done, "model", "protocol").items():
        rows = [name for name in unique(r["policy"] for r in mine) if not _is_reference(name)]
        settings = group_by(mine, "setting")
        short = short_heads([setting for (setting,) in settings])
        columns = []
        books: dict[str, list[tuple[float, float]]] = {row: [] for row in rows}
        for (setting,), cells in settings.items():
            pairs = {row: _pairs(cells, row) for row in rows}
            better = cells[0]["better"]
            head = f"{short[setting]}, {'ratio' if better == 'lower' else 'difference'}"
            figures = tuple(_paired(pairs[row], better == "lower") for row in rows)
            columns.append(Column(head, figures, None))
            for row in rows:
                for one, other in pairs[row][:1]:
                    books[row] += zip(book_losses(one), book_losses(other), strict=False)
        if max(map(len, books.values()), default=0) > 1:
            figures = tuple(_ratio([a - b for a, b in books[row]]) for row in rows)
            columns.append(Column("ppl by books, ratio", figures, None))
        found = [column for column in columns if any(column.figures)]
        kept = [n for n in range(len(rows)) if any(column.figures[n] for column in found)]
        if not kept:
            continue
        title = (
            f"{model if paper is None else f'{model}, protocol {paper}'}: compared with {REFERENCE}"
        )
        parts = [
            Column(c.head, tuple(c.figures[n] for n in kept), c.better, c.digits) for c in found
        ]
        tables.append(FigureTable(title, tuple(rows[n] for n in kept), tuple(parts)))
    return tables


def _is_reference(policy: str) -> bool:
    return strip_budget(policy) == REFERENCE


def _pairs(cells: Sequence[CellRecord], policy: str) -> list[tuple[CellRecord, CellRecord]]:
    """Return the records of a policy, each with the reference's record that it is compared with."""
    beside = [r for r in cells if _is_reference(r["policy"])]
    found = []
    for record in (r for r in cells if r["policy"] == policy):
        same = [r for r in beside if _size(r) == _size(record)] if record.get("budget") else []
        if not same and len({r["policy"] for r in beside}) == 1:
            same = [r for r in beside if _size(r)[:2] == _size(record)[:2]]
        seeds = {r["seed"]: r for r in same}
        # A reference that does not depend on the seed is measured once; all seeds are compared
        # with it.
        once = same[0] if len(same) == 1 and block_losses(record) else None
        if (other := seeds.get(record["seed"], once)) is not None:
            found.append((record, other))
    return found


def _size(record: CellRecord) -> tuple[Any, ...]:
    """Return the cell's settings for reading, and its size in bytes or slots."""
    memory, how = record.get("memory"), (record.get("chunk", 64), record.get("positions"))
    return (*how, record.get("equal"), memory, record.get("budget") if memory is None else None)


def _paired(pairs: Sequence[tuple[CellRecord, CellRecord]], ratio: bool) -> Estimate | None:
    """Return the difference of two policies by blocks, by answers, or otherwise by seeds."""
    if not pairs:
        return None
    blocks = [(block_losses(one), block_losses(other)) for one, other in pairs]
    if all(a and len(a) == len(b) for a, b in blocks):
        each = [[x - y for x, y in zip(a, b, strict=True)] for a, b in blocks]
        return _ratio([fmean(block) for block in zip(*each, strict=True)])
    marks = [tuple(_marks(record) for record in pair) for pair in pairs]
    if all(a and len(a) == len(b) for a, b in marks):
        mine, theirs = (list(chain.from_iterable(side)) for side in zip(*marks, strict=True))
        middle, low, high = paired_shares(mine, theirs)
        return Estimate(middle, len(mine), len(pairs), None, low, high)
    values = [(one["value"], other["value"]) for one, other in pairs]
    if not ratio:
        return Estimate.of([a - b for a, b in values])
    return _ratio([log(a / b) for a, b in values]) if all(min(v) > 0 for v in values) else None


def _marks(record: CellRecord) -> list[bool]:
    """Return which answers of a record are right, in the order of the questions; empty if
    unknown.
    """
    return [mark == "1" for mark in record["result"].get("marks", "")]


def _ratio(logs: Sequence[float]) -> Estimate | None:
    """Estimate a ratio from the logarithms of the ratios of some pairs."""
    if not logs:
        return None
    middle, reach = mean_interval(logs)
    ends = (None, None) if reach is None else (exp(middle - reach), exp(middle + reach))
    return Estimate(exp(middle), len(logs), len(logs), None, *ends)


def across_models(records: Sequence[CellRecord]) -> list[FigureTable]:
    """One table per protocol: policies relative to StreamingLLM at the same size, mean over models.

    Figures for which lower is better (perplexities and errors) are ratios; shares of right answers
    are differences. Each model counts once, with its mean over seeds, sizes and ways of loading,
    and the interval is over the models. Policies that were written with a budget are left out,
    and so are figures that some model lacks. There is no table for fewer than two models.
    """
    sized = [r for r in records if r["status"] == "done" and r.get("budget") is not None]
    tables = []
    for (paper,), mine in group_by(sized, "protocol").items():
        found = _means([r for r in mine if r["value"] is not None])
        beside = [place for place, row in found.items() if REFERENCE in row]
        models = unique(model for model, *_ in beside)
        if len(models) < 2:
            continue
        settings = list(unique(setting for _, setting, _ in beside))
        short = short_heads(settings)
        rows = unique(name for place in beside for name in found[place])
        columns = []
        for setting in settings:
            better = next(r["better"] for r in mine if r["setting"] == setting)
            changes = [_changes(found, setting, name, better == "lower") for name in rows]
            figures = tuple(
                Estimate.of(list(change.values())) if change.keys() == set(models) else None
                for change in changes
            )
            head = f"{short[setting]}, {'ratio' if better == 'lower' else 'difference'}"
            columns.append(Column(head, figures, better))
        title = f"mean of {len(models)} models compared with {REFERENCE}"
        title = title if paper is None else f"{title}, protocol {paper}"
        tables.append(FigureTable(title, rows, tuple(columns)))
    return tables


def _changes(
    found: Mapping[Place, Mapping[str, float]], setting: str, name: str, ratio: bool
) -> dict[str, float]:
    """Return a policy's change relative to the reference by model, averaged over the sizes at which
    both were measured.
    """
    changes: dict[str, list[float]] = defaultdict(list)
    for (model, here, _), row in found.items():
        if here == setting and {name, REFERENCE} <= row.keys() and (row[REFERENCE] or not ratio):
            now, was = row[name], row[REFERENCE]
            changes[model].append(now / was if ratio else now - was)
    return {model: fmean(values) for model, values in changes.items()}


def _means(records: Sequence[CellRecord]) -> Mapping[Place, Mapping[str, float]]:
    """Return means over seeds, by place and policy without budget."""
    values: dict[Place, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        model, memory = record["model"], record.get("memory")
        size = (memory, record["budget"] if memory is None else None)
        how = (model, record.get("chunk", 64), record.get("positions", "rolling"), size)
        place = (str(record.get("loaded", model)), record["setting"], how)
        policy = strip_budget(record.get("written") or record["policy"])
        values[place][policy].append(record["value"])
    return {
        place: {name: fmean(each) for name, each in row.items()} for place, row in values.items()
    }
