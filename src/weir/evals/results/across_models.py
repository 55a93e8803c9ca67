"""What policies change, over several models: figures beside StreamingLLM's at the same size.

Models differ by more than policies do, so their figures are never averaged, only what a policy
makes of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from weir.evals.results.figures import Figure
from weir.evals.results.file import CellRecord, unique
from weir.evals.results.summary import Column, Table, grouped, heads, without_budget

REFERENCE = "streaming_llm"
"""The policy beside which all others are put."""


@dataclass(frozen=True)
class Place:
    """What two policies agree in whose figures are put beside each other.

    Attributes:
        model, setting, chunk, positions: as of a cell.
        loaded: the model's own name, however it was loaded.
        memory: bytes that budgets were made for; None where they were given in slots.
        budget: slots that were put in; None where bytes were given.
    """

    model: str
    loaded: str
    setting: str
    chunk: int
    positions: str
    memory: int | None
    budget: int | None

    @classmethod
    def of(cls, record: CellRecord) -> Place:
        """The place of a record."""
        memory = record.get("memory")
        budget = record["budget"] if memory is None else None
        chunk, positions = record.get("chunk", 64), record.get("positions", "rolling")
        model = record["model"]
        loaded = str(record.get("loaded", model))
        return cls(model, loaded, record["setting"], chunk, positions, memory, budget)


def across_models(records: Sequence[CellRecord]) -> list[Table]:
    """For each protocol, what policies change beside StreamingLLM at the same size: mean of models.

    Of what is better when it is lower, perplexities and errors, the ratio; of shares of right
    answers the difference. Each model counts once, with its mean over seeds, sizes and ways in
    which it was loaded, and the
    interval is that of the models. Policies whose budget was not put in are left out, and a figure
    that some model lacks.

    Args:
        records: of any models. There is no table of fewer than two.
    """
    sized = [r for r in records if r["status"] == "done" and r.get("budget") is not None]
    tables = []
    for (paper,), mine in grouped(sized, "protocol").items():
        found = _means([r for r in mine if r["value"] is not None])
        beside = [place for place, row in found.items() if REFERENCE in row]
        models = unique(place.loaded for place in beside)
        if len(models) < 2:
            continue
        settings = list(unique(place.setting for place in beside))
        short, rows = heads(settings), unique(name for place in beside for name in found[place])
        columns = []
        for setting in settings:
            better = next(r["better"] for r in mine if r["setting"] == setting)
            changes = [_changes(found, setting, name, better == "lower") for name in rows]
            figures = tuple(
                Figure.of(list(change.values())) if change.keys() == set(models) else None
                for change in changes
            )
            means = tuple(None if it is None else it.mean for it in figures)
            head = f"{short[setting]}, {'ratio' if better == 'lower' else 'difference'}"
            columns.append(Column(head, means, better, 3, figures=figures))
        title = f"mean of {len(models)} models beside {REFERENCE}"
        title = title if paper is None else f"{title}, protocol {paper}"
        tables.append(Table(title, rows, tuple(columns)))
    return tables


def _changes(
    found: Mapping[Place, Mapping[str, float]], setting: str, name: str, ratio: bool
) -> dict[str, float]:
    """What a policy makes of a setting on each model: the mean of the sizes both were given."""
    each: dict[str, list[float]] = {}
    for place, row in found.items():
        if place.setting != setting or not {name, REFERENCE} <= row.keys():
            continue
        now, was = row[name], row[REFERENCE]
        if was or not ratio:
            each.setdefault(place.loaded, []).append(now / was if ratio else now - was)
    return {model: fmean(values) for model, values in each.items()}


def _means(records: Sequence[CellRecord]) -> Mapping[Place, Mapping[str, float]]:
    """The mean over seeds of each policy, without its budget, at each place."""
    values: dict[Place, dict[str, list[float]]] = {}
    for record in records:
        row = values.setdefault(Place.of(record), {})
        policy = record["written"] if "written" in record else record["policy"]
        row.setdefault(without_budget(policy), []).append(record["value"])
    return {
        place: {name: fmean(each) for name, each in row.items()} for place, row in values.items()
    }
