"""Figures written down: a Markdown table for the documentation."""

from __future__ import annotations

from weir.evals.report import TextTable
from weir_bench.figure import Row
from weir_bench.run import Bench


def markdown(bench: Bench) -> str:
    """The table, and below it what the figures were made on and what was left out."""
    heads = ("figure", "dtype", "weir", "peer", "ratio", "target", "")
    rows = [
        (
            row.what,
            dtype,
            f"{number(row.ours)} {row.unit}",
            f"{number(row.peer)} {row.unit}",
            f"**{number(row.ratio)}**" if row.met is False else number(row.ratio),
            target(row),
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


def number(value: float) -> str:
    """Three digits that matter."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
