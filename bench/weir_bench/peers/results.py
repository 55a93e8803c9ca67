"""The results so far, in a file that is written after every figure and that a run can continue."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weir.cli.common import writing
from weir.errors import WeirError, quote


@dataclass
class Results:
    """Figures, each identified by its part and by facts such as the engine and the threads.

    Attributes:
        path: the file, or None if results are not saved.
        facts: date, machine, versions and command of the run that began the file.
        figures: the figures, each with "part", the facts that identify it, and the measurements.
        missing: peers that could not be measured, with the reason.
    """

    path: Path | None
    facts: dict[str, Any] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    @classmethod
    def at(cls, path: Path | None, facts: dict[str, Any]) -> Results:
        """Read the results in a file, or begin without results if it does not exist.

        Peers that were missing in the file are tried again.
        """
        if path is None or not path.exists():
            return cls(path, facts)
        found = read_results(path)
        sessions = [*found.facts.get("sessions", []), facts]
        return cls(path, {**found.facts, "sessions": sessions}, found.figures)

    def find(self, part: str, **named: Any) -> dict[str, Any] | None:
        """Return the first figure of a part with the given facts, or None."""
        wanted = {"part": part, **named}
        for figure in self.figures:
            if wanted.items() <= figure.items():
                return figure
        return None

    def add(self, part: str, named: dict[str, Any], measured: dict[str, Any]) -> None:
        """Add a figure, in place of an earlier one with the same facts, and write the file."""
        old = self.find(part, **named)
        if old is not None:
            self.figures.remove(old)
        self.figures.append({"part": part, **named, **measured})
        self.write()

    def miss(self, who: str, why: object) -> None:
        """Record why a peer cannot be measured, and write the file."""
        self.missing[who] = str(why)
        self.write()

    def as_json(self) -> dict[str, Any]:
        """Return all results as JSON values."""
        return {**self.facts, "missing": self.missing, "figures": self.figures}

    def write(self) -> None:
        """Replace the file as a whole, so that it is never half written."""
        if self.path is None:
            return
        part = self.path.with_suffix(".part")
        lines = ",\n".join(f"  {json.dumps(each)}" for each in self.figures)
        head = json.dumps({**self.facts, "missing": self.missing}, indent=1)[:-2]
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(f'{head},\n "figures": [\n{lines}\n ]\n}}\n', "utf-8")
            os.replace(part, self.path)


def read_results(path: Path) -> Results:
    """Read the results in a file."""
    try:
        found = json.loads(path.read_text("utf-8"))
        return Results(
            path, figures=found.pop("figures"), missing=found.pop("missing"), facts=found
        )
    except OSError as error:
        raise WeirError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError):
        raise WeirError(
            f"{quote(str(path))} is not a result of weir bench peers. Name another file with --out."
        ) from None
