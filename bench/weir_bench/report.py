"""Writes figures down: a Markdown table and a plot, for the documentation."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from weir_bench.figure import Row
from weir_bench.run import Bench

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MET, MISSED = "#0072b2", "#d55e00"
"""Blue and vermilion, which everybody can tell apart; a mark that is missed is a cross too."""


def markdown(bench: Bench) -> str:
    """The table, and below it what the figures were made on and what was left out."""
    lines = [
        "| figure | dtype | weir | peer | ratio | target | bound by, its share | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for _, dtype, row in bench.rows:
        cells = [
            row.what,
            dtype,
            f"{number(row.ours)} {row.unit}",
            f"{number(row.peer)} {row.unit}",
            f"**{number(row.ratio)}**" if row.met is False else number(row.ratio),
            target(row),
            bound(row),
            row.note,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", machine_line(bench)]
    lines += [f"- Not measured: {name} {dtype}: {why}." for name, dtype, why in bench.skipped]
    return "\n".join(lines) + "\n"


def machine_line(bench: Bench) -> str:
    """What the figures were made on, in a sentence."""
    facts = bench.machine
    kernels = ", ".join(f"{name} {way}" for name, way in facts["kernels"].items())
    layers = f"{facts['layers']} layers; " if "layers" in facts else ""
    return (
        f"{facts['processor']}, {facts['threads']} threads, Python {facts['python']}, PyTorch "
        f"{facts['torch']}, transformers {facts['transformers']}, weir {facts['weir']}; "
        f"{layers}kernels: {kernels}."
    )


def target(row: Row) -> str:
    """What the ratio is to reach, in words of a table."""
    if row.target is None:
        return ""
    return f"{'≥' if row.least else '≤'} {row.target:g}"


def bound(row: Row) -> str:
    """What bounds it, and which share of its time that would take."""
    return row.bound if row.share is None else f"{row.bound} {row.share:.2f}".strip()


def number(value: float) -> str:
    """Three digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def plot(bench: Bench) -> str:
    """Every figure that has a target, beside it, as SVG: left of the line it is met."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = [(dtype, row) for _, dtype, row in bench.rows if row.target is not None]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "weir", "font.size": 9}):
        figure = Figure(figsize=(9.0, 0.8 + 0.24 * max(1, len(rows))), layout="constrained")
        axes = figure.subplots()
        for place, (_, row) in enumerate(rows):
            assert row.target is not None
            part = row.target / row.ratio if row.least else row.ratio / row.target
            axes.plot(part, place, "o" if row.met else "X", ms=5, color=MET if row.met else MISSED)
            axes.plot([1, part], [place, place], color=MET if row.met else MISSED, lw=1)
        _dress(axes, [f"{row.what} {dtype}".replace("`", "").strip() for dtype, row in rows])
        page = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(page, format="svg", metadata=nothing)
    svg = page.getvalue()
    return re.sub(r' id="[a-z0-9.]+_\d+"', "", svg[svg.index("<svg") :])


def _dress(axes: Axes, names: list[str]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.invert_yaxis()
    axes.axvline(1, color="#555555", lw=1)
    axes.set_xlabel("part of what the target allows; 1 and less meets it")
    axes.grid(axis="x", color="#e3e7ea", lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
