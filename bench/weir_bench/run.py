"""Measure figures one after the other, and collect their rows and facts about the machine.

`figure.py` defines what a figure is, `report.py` formats the rows, and the files in `figures/`
measure. The two sides of a ratio are timed in turns, so that other load on the machine slows both.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
import transformers

import weir
from weir import kernels, native
from weir_bench.figure import FIGURES, Row, Setting, Skipped, chosen
from weir_bench.timing import settled

_FILES = "around decode flat kernels kvpress policies prompts rows start".split()
for _name in _FILES:
    import_module(f"weir_bench.figures.{_name}")  # importing it registers its figures


@dataclass
class Bench:
    """The results of a run, with facts about the machine.

    Attributes:
        machine: processor, threads, versions, and which kernels ran.
        rows: (figure, dtype, row), in the order of measurement.
        skipped: (figure, dtype, reason) of figures that could not be measured.
        marks: time and memory of the long stream at several positions, if it was measured.
    """

    machine: dict[str, Any]
    rows: list[tuple[str, str, Row]] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return all results as JSON values."""
        return {
            "machine": self.machine,
            "rows": [{"figure": f, "dtype": d, **row.as_json()} for f, d, row in self.rows],
            "skipped": [{"figure": f, "dtype": d, "why": why} for f, d, why in self.skipped],
            "marks": self.marks,
        }


def measure(
    setting: Setting,
    names: Sequence[str],
    dtypes: Sequence[torch.dtype],
    on_row: Callable[[Bench], None] = lambda bench: None,
) -> Bench:
    """Measure figures in each dtype. A figure that does not depend on the dtype uses the first.

    `on_row` is called with the results so far after every row, every skipped figure and every
    measurement of the long stream, so that they can be saved.
    """
    bench = Bench({**machine(), "layers": setting.sizes.layers})

    def mark(marks: list[dict[str, Any]]) -> None:
        bench.marks = marks
        on_row(bench)

    for name in chosen(names):
        figure = FIGURES[name]
        for dtype in dtypes if figure.by_dtype else dtypes[:1]:
            precision = str(dtype).removeprefix("torch.") if figure.by_dtype else ""
            setting.say(f"{name} {precision}".strip())
            try:
                with settled():
                    for row in figure.measure(replace(setting, dtype=dtype, on_mark=mark)):
                        bench.rows.append((name, precision, row))
                        on_row(bench)
            except Skipped as reason:
                bench.skipped.append((name, precision, str(reason)))
                on_row(bench)
    return bench


def machine() -> dict[str, Any]:
    """Return facts about the machine, versions and kernels, including those of a GPU."""
    facts = {
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "weir": weir.__version__,
        "kernels": {**kernels.paths(torch.device("cpu")), **native.paths(torch.device("cpu"))},
    }
    if torch.cuda.is_available():
        device = torch.device("cuda")
        facts |= {"gpu": torch.cuda.get_device_name(device), "gpu_kernels": kernels.paths(device)}
    return facts


def _processor() -> str:
    """Return the name of the processor, as far as the system gives it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
