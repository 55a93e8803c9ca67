"""Format the figures of `weir bench` as a Markdown table for the documentation."""

from __future__ import annotations

from weir.evals.report import TextTable
from weir_bench.figure import Row
from weir_bench.run import Bench


def markdown(bench: Bench) -> str:
    """Return the table, followed by the machine and versions, and the figures not measured."""
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
    """Return one sentence with the processor, the versions and the kernels that were used."""
    facts = bench.machine
    kernels = ", ".join(f"{name} {way}" for name, way in facts["kernels"].items())
    layers = f"{facts['layers']} layers; " if "layers" in facts else ""
    return (
        f"{facts['processor']}, {facts['threads']} threads, Python {facts['python']}, PyTorch "
        f"{facts['torch']}, transformers {facts['transformers']}, weir {facts['weir']}; "
        f"{layers}kernels: {kernels}."
    )


def target(row: Row) -> str:
    """Return the target of a row for its table cell, such as "≤ 0.95". Without a target, ""."""
    if row.target is None:
        return ""
    return f"{'≥' if row.least else '≤'} {row.target:g}"


def number(value: float) -> str:
    """Format a number with three significant digits, or as a whole number from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
