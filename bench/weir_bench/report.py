"""Figures written down: a Markdown table and a plot, for the documentation."""

from __future__ import annotations

from weir.evals.report import COLORS, INK, TextTable, style_axes, svg_figure
from weir_bench.figure import Row
from weir_bench.run import Bench

MET, MISSED = COLORS[:2]
"""Colors of targets; a mark that is missed is a cross too."""


def markdown(bench: Bench) -> str:
    """The table, and below it what the figures were made on and what was left out."""
    heads = ("figure", "dtype", "weir", "peer", "ratio", "target", "bound by, its share", "")
    rows = [
        (
            row.what,
            dtype,
            f"{number(row.ours)} {row.unit}",
            f"{number(row.peer)} {row.unit}",
            f"**{number(row.ratio)}**" if row.met is False else number(row.ratio),
            target(row),
            bound(row),
            row.note,
        )
        for _, dtype, row in bench.rows
    ]
    lines = [TextTable(heads, rows, markup=True).markdown(), "", machine_line(bench)]
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
    rows = [(dtype, row) for _, dtype, row in bench.rows if row.target is not None]
    with svg_figure("weir", 9.0, 0.8 + 0.24 * max(1, len(rows))) as (figure, out):
        axes = figure.subplots()
        axes.set_xscale("log")
        for place, (_, row) in enumerate(rows):
            assert row.target is not None
            part = row.target / row.ratio if row.least else row.ratio / row.target
            color = MET if row.met else MISSED
            axes.plot(part, place, "o" if row.met else "X", ms=5, color=color)
            axes.plot([1, part], [place, place], color=color, lw=1)
        style_axes(axes)
        names = [f"{row.what} {dtype}".replace("`", "").strip() for dtype, row in rows]
        axes.set_yticks(range(len(names)), names, fontsize=7.5)
        axes.grid(visible=False, axis="y")
        axes.invert_yaxis()
        axes.axvline(1, color=INK, lw=1)
        axes.set_xlabel("part of what the target allows; 1 and less meets it")
    return out[0]
