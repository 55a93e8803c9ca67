"""Runs figures one after the other and collects their rows, with what they were made on.

`figure` says what a figure is, `report` writes rows down; the other files measure. A figure is a
ratio of things that took turns, so what else the machine does meets both.
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
    import_module(f"weir_bench.figures.{_name}")  # which registers its figures


@dataclass
class Bench:
    """What figures were made, and on what.

    Attributes:
        machine: processor, threads, versions, and which way kernels went.
        rows: (figure, dtype, row), as they came.
        skipped: (figure, dtype, why).
        marks: what the long stream showed at its marks, if it ran.
    """

    machine: dict[str, Any]
    rows: list[tuple[str, str, Row]] = field(default_factory=list)
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
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
    """Make figures of each dtype, or of the first where a figure does not depend on it.

    `on_row` is told after every row and every mark of the long stream, so that it can be kept.
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
    """What figures are made on, and with; a GPU and its kernels where there is one."""
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
    """Its name, where the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
