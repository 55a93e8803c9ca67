"""One model loaded in two ways, or compiled, is two models to a table: its name says which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weir.evals.results.file import CellRecord

DEFAULTS = {"dtype": "auto"}
"""Of the arguments of `weir.load`, those whose default has a value; given it, nothing is said."""


def as_loaded(records: Sequence[CellRecord]) -> list[CellRecord]:
    """Records whose model is named with how it was loaded: `nano (dtype bfloat16)`.

    A model that was loaded the usual way keeps its name, and so does one of these records. `loaded`
    has the model's own name, by which it is one model still.

    Args:
        records: of cells, as they stand in a results file.
    """
    named = []
    for record in records:
        rest = {key: value for key, value in record.items() if key not in ("loading", "compiled")}
        told = {**(record.get("loading") or {}), "compiled": record.get("compiled")}
        model, how = record["model"], _how(told)
        named.append({**rest, "model": model + how, "loaded": rest.get("loaded", model)})
    return named


def _how(loading: Mapping[str, Any]) -> str:
    """What was not left to the default, in brackets behind a space; empty where all was."""
    words = [
        name.replace("_", " ") if value is True else f"{name.replace('_', ' ')} {value}"
        for name, value in sorted(loading.items())
        if value and value != DEFAULTS.get(name)
    ]
    return f" ({', '.join(words)})" if words else ""
