"""Measure the requested parts, and collect their rows and runs."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weir_bench.figure import Skipped
from weir_bench.run import Bench
from weir_bench.run import machine as machine_of
from weir_bench.serving.load import Heard
from weir_bench.serving.models import make_folder
from weir_bench.serving.part import PARTS, Plan, chosen
from weir_bench.serving.parts import attack, compaction, disk, far, pace, peer, refused, soak

_MEASURE = (pace, far, disk, compaction, peer, soak, attack, refused)  # imported to register them


@dataclass
class Served(Bench):
    """The results of `weir bench serve`, with facts about the machine."""

    command: str = ""
    runs: list[tuple[str, Heard]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return all results as JSON values."""
        runs = [{"part": name, **heard.as_json()} for name, heard in self.runs]
        return {"command": self.command, **super().as_json(), "runs": runs}


def measure(
    plan: Plan, names: Sequence[str], on_more: Callable[[Served], None] = lambda served: None
) -> Served:
    """Measure parts, and return their results.

    `on_more` is called with the results so far after every row and run, and during long runs.
    """
    wanted = chosen(names)
    command = shlex.join(["weir", *sys.argv[1:]])
    served = Served(machine_of(), command=command)
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as scratch:
        folder = make_folder(plan.model, Path(scratch) / "model")
        for name in wanted:

            def so_far(heard: Heard, name: str = name) -> None:
                on_more(replace(served, runs=[*served.runs, (name, heard)]))

            plan.say(name)
            its = replace(plan, folder=folder, scratch=Path(scratch), on_heard=so_far)
            try:
                for made in PARTS[name].measure(its):
                    if isinstance(made, Heard):
                        served.runs.append((name, made))
                    else:
                        served.rows.append((name, plan.model, made))
                    on_more(served)
            except Skipped as reason:
                served.skipped.append((name, plan.model, str(reason)))
                on_more(served)
    return served
