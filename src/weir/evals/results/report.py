"""Reports of results: one HTML page with its plots inside, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import html
import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from weir.errors import WeirError
from weir.evals.report import (
    GRAY,
    TextTable,
    html_page,
    line_style,
    needs_log_scale,
    style_axes,
    svg_figure,
    whole_blocks,
)
from weir.evals.results.file import CellRecord, failures, unique
from weir.evals.results.naming import read_together
from weir.evals.results.summary import (
    CACHE,
    FigureTable,
    across_models,
    by_distance,
    group_by,
    overviews,
    short_heads,
    strip_budget,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def as_markdown(table: FigureTable) -> str:
    """A table in Markdown."""
    rows = _rows(table, "**%s**", "<u>%s</u>", " <small>%s</small>", group=",")
    cells = [[_code(name), *map("".join, row)] for name, row in rows]
    return TextTable(["policy", *(column.head for column in table.columns)], cells).markdown()


def as_html(table: FigureTable) -> str:
    """A table in HTML."""
    heads = ["policy", *(html.escape(column.head) for column in table.columns)]
    rows = _rows(table, "<b>%s</b>", "<u>%s</u>", " <small>%s</small>", group=",")
    cells = [[f"<code>{html.escape(name)}</code>", *map("".join, row)] for name, row in rows]
    return TextTable(heads, cells, markup=True).html()


def _rows(
    table: FigureTable, best: str, second: str, sure: str, **how: str
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each policy with its figures and their intervals, empty where there is none.

    `best`, `second` and `sure` are patterns of what is marked; `how` is for `Column.written`.
    """
    marks = {1: best, 2: second}
    places = [column.places() for column in table.columns]
    for row, name in enumerate(table.rows):
        cells = []
        for column, place in zip(table.columns, places, strict=True):
            interval = column.sure(row)
            mark = marks.get(place.get(row, 0), "%s")
            cells.append((mark % column.written(row, **how), sure % interval if interval else ""))
        yield name, cells


def as_csv(tables: Sequence[FigureTable]) -> str:
    """Tables as comma-separated values, one unrounded figure per line."""
    target = io.StringIO()
    lines = csv.writer(target, lineterminator="\n")
    names = ("mean", "sd", "low", "high", "n", "seeds")
    lines.writerow(["table", "policy", "column", *names])
    for table in tables:
        for column in table.columns:
            for name, figure in zip(table.rows, column.figures, strict=True):
                if figure is not None:
                    facts = [getattr(figure, fact) for fact in names]
                    lines.writerow([table.title, name, column.head, *facts])
    return target.getvalue()


def as_latex(tables: Sequence[FigureTable]) -> str:
    """Tables for a paper that loads booktabs: means, and below them 95 % intervals, sd and n."""
    return "% \\usepackage{booktabs}\n" + "\n".join(_latex(table) for table in tables)


def _latex(table: FigureTable) -> str:
    heads = " & ".join(["policy", *(_tex(column.head) for column in table.columns)])
    body = []
    marks = r"\textbf{%s}", r"\underline{%s}", r"{\scriptsize %s}"
    for name, cells in _rows(table, *marks, unknown="--"):
        figures, below = zip(*cells, strict=True)
        body.append(" & ".join([rf"\texttt{{{_tex(name)}}}", *figures]) + r" \\")
        if any(below):
            body.append(" & ".join(["", *(sure.replace("–", "--") for sure in below)]) + r" \\")
    begin = rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}"
    top = [f"% {table.title}", begin, r"\toprule", rf"{heads} \\", r"\midrule"]
    return "\n".join([*top, *body, r"\bottomrule", r"\end{tabular}", ""])


def _tex(text: str) -> str:
    """Escape text for LaTeX."""
    special = {"\\": r"\textbackslash{}", "|": r"\textbar{}", "~": r"\textasciitilde{}"}
    special |= {"^": r"\textasciicircum{}", "–": "--", "<": r"\textless{}", ">": r"\textgreater{}"}
    special |= {mark: rf"\{mark}" for mark in "&%$#_{}"}
    return "".join(special.get(letter, letter) for letter in text)


def _code(name: str) -> str:
    """Format a policy as code in a cell, with bars escaped, which would end the cell."""
    return f"<code>{name.replace('|', '&#124;')}</code>" if "|" in name else f"`{name}`"


WIDTH = 7.6
"""Inches."""
FAR = 20.0
"""From such a ratio of the largest figure to the smallest on, a scale is logarithmic."""
FAR_BYTES = 10.0
"""The same of bytes: policies of some hundred slots and exact attention are farther apart."""


def family(policy: str) -> str:
    """The name that policies of different budgets share; a pipe is its own name.

    For a policy written without the word `budget`, this is the name before the bracket.
    """
    plain = strip_budget(policy)
    return plain if plain != policy or " | " in policy else policy.partition("(")[0]


def pareto_front(points: Sequence[tuple[float, float]], higher: bool) -> list[int]:
    """Indices of the points (bytes, quality) that no other beats in both, by rising bytes."""
    costs = [(nbytes, -quality if higher else quality) for nbytes, quality in points]
    best: list[int] = []
    for i in sorted(range(len(points)), key=costs.__getitem__):
        if not best or costs[i][1] < costs[best[-1]][1]:
            best.append(i)
    return best


def plot_pareto(records: Sequence[CellRecord], label: str) -> str | None:
    """Plot figures against cache bytes, budgets of a policy joined, the Pareto front in gray.

    The records are of one model and setting; None where fewer than two policies have both figures.
    """
    of_policy = group_by((r for r in records if r["value"] is not None and r["kv_bytes"]), "policy")
    if len(of_policy) < 2:
        return None
    points = [
        (max(r["kv_bytes"] for r in rows) / 1e6, mean(r["value"] for r in rows))
        for rows in of_policy.values()
    ]
    families = [family(policy) for (policy,) in of_policy]
    with svg_figure(f"pareto{label}", WIDTH, _height(len(points))) as (figure, out):
        axes = figure.subplots()
        best = [points[i] for i in pareto_front(points, records[0]["better"] == "higher")]
        front: dict[str, Any] = {"color": GRAY, "lw": 5, "alpha": 0.25, "zorder": 1}
        axes.plot(*zip(*best, strict=True), **front, label="not beaten in both")
        for number, kind in enumerate(unique(families)):
            mine = sorted(p for p, name in zip(points, families, strict=True) if name == kind)
            axes.plot(*zip(*mine, strict=True), lw=1.2, ms=6, label=kind, **line_style(number))
        _dress_axes(axes, "cache, MB", label, *zip(*points, strict=True))
    return out[0]


def plot_along(records: Sequence[CellRecord]) -> str | None:
    """Plot perplexity by whole block of a text, a line per policy; None without blocks.

    Only the first seed of the records is drawn, which are of one model and setting.
    """
    rows = [r for r in records if len(r["result"].get("ppl_by_block", ())) > 1]
    of_policy = group_by(rows, "policy")
    if not of_policy:
        return None
    with svg_figure("along", WIDTH, _height(len(of_policy))) as (figure, out):
        axes = figure.subplots()
        every = []
        for number, ((policy,), mine) in enumerate(of_policy.items()):
            result = mine[0]["result"]
            values = whole_blocks(result["ppl_by_block"], result["tokens"], result["block"])
            edges = [min(i * result["block"], result["tokens"]) for i in range(len(values) + 1)]
            middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
            # Markers of many blocks would merge into one band.
            often = max(1, len(values) // 8) if len(values) > 25 else 1
            how = {"lw": 1.4, "ms": 4, "markevery": often, **line_style(number)}
            axes.plot(middles, values, label=policy, **how)
            every += [v for v in values if v is not None]
        _dress_axes(axes, "tokens read", "perplexity", (), every)
    return out[0]


def plot_heat(records: Sequence[CellRecord]) -> str | None:
    """Plot heat maps of accuracy by length and depth, a panel per policy; None without such cells.

    The mean over seeds of the records is drawn, which are of one model and setting.
    """
    of_policy = group_by((r for r in records if r["result"].get("cells")), "policy")
    if not of_policy:
        return None
    across = min(3, len(of_policy))
    down = -(-len(of_policy) // across)
    with svg_figure("heat", WIDTH, 1.9 * down + 0.6) as (figure, out):
        panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
        for axes in panels[len(of_policy) :]:
            axes.set_axis_off()
        image = None
        for axes, ((policy,), mine) in zip(panels, of_policy.items(), strict=False):
            cells = group_by((c for r in mine for c in r["result"]["cells"]), "length", "depth")
            lengths = sorted(unique(length for length, _ in cells))
            depths = sorted(unique(depth for _, depth in cells))
            found = [
                [_share(cells.get((length, depth), [])) for length in lengths] for depth in depths
            ]
            image = axes.imshow(found, vmin=0, vmax=1, cmap="cividis", aspect="auto")
            axes.set_title(policy, fontsize=8)
            axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45)
            axes.set_yticks(range(len(depths)), [f"{100 * d:.0f} %" for d in depths])
            axes.tick_params(labelsize=7)
        figure.supxlabel("tokens", fontsize=8)
        figure.supylabel("depth", fontsize=8)
        if image is not None:
            figure.colorbar(image, ax=panels.tolist(), shrink=0.8, label="found")
    return out[0]


def _share(cells: Sequence[dict[str, Any]]) -> float:
    """Mean accuracy; NaN if nothing was asked, which leaves a hole."""
    return float(mean(cell["accuracy"] for cell in cells)) if cells else math.nan


def _height(names: int) -> float:
    """Height in inches of a picture with a legend of three names per row below."""
    return 3.4 + 0.17 * -(-names // 3)


def _dress_axes(axes: Axes, across: str, up: str, x: Sequence[float], y: Sequence[float]) -> None:
    """Label, scale and style axes, and put the legend below them, where it hides no point."""
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    if needs_log_scale(x, FAR_BYTES):
        axes.set_xscale("log")
    if needs_log_scale(y, FAR):
        axes.set_yscale("log")
    style_axes(axes)
    axes.figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=3)


FORMATS = {"html": "report.html", "md": "report.md", "csv": "tables.csv", "latex": "tables.tex"}
"""The file name of each format of a report."""
USUAL = ("html", "md")
MARKS = "Bold is best, underlined second best."
SURE = (
    "After a figure come its 95 % interval (Wilson's for counted answers, Student's over seeds), "
    "the standard deviation over seeds, and n, answers or seeds. A figure without these was "
    "measured once."
)

STYLE = "body { max-width: 60rem; } svg { min-width: 30rem; }"
"""CSS for wide tables and pictures."""
ACROSS = "After a figure come Student's 95 % interval, the standard deviation and n of the models."


@dataclass(frozen=True)
class ReportPart:
    """A part of a report."""

    title: str
    words: str
    table: FigureTable | None = None
    picture: str | None = None
    name: str = ""


def write_report(
    results: Path | Sequence[Path], out: Path, formats: Sequence[str] = USUAL
) -> list[Path]:
    """Write `report.html`, which holds its pictures, and `report.md` with them beside it.

    Args:
        results: one or several files of `weir eval`, which may still be growing.
        out: output folder, created if missing.
        formats: names from `FORMATS`; `csv` and `latex` have the tables alone.

    Returns:
        Paths of the files that were written.

    Raises:
        WeirError: the results cannot be read or contradict each other, no cell is done yet, a
            format is unknown, or a file cannot be written.
    """
    for name in formats:
        if name not in FORMATS:
            raise WeirError(f"unknown report format {name!r}. Use one of {', '.join(FORMATS)}.")
    paths = [results] if isinstance(results, Path) else list(results)
    cells, records = read_together(paths)
    source = ", ".join(path.name for path in paths)
    done = [record for record in records if record["status"] == "done"]
    if not done:
        raise WeirError(f"{source} has no finished cell yet, so there is nothing to report")
    parts = list(_parts(done))
    tables = [part.table for part in parts if part.table is not None]
    page = (parts, _facts(cells, records), failures(records), source)
    renderers: dict[str, Callable[[], str]] = {
        "html": lambda: _html(*page),
        "md": lambda: _markdown(*page),
        "csv": lambda: as_csv(tables),
        "latex": lambda: as_latex(tables),
    }
    if out.exists() and not out.is_dir():
        raise WeirError(f"{out} is a file, and --out must be a folder. Use another name.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        wanted = [name for name in FORMATS if name in formats]
        for name in wanted:
            (out / FORMATS[name]).write_text(renderers[name](), "utf-8")
        for part in parts:
            if part.picture is not None and "md" in formats:
                (out / f"{part.name}.svg").write_text(part.picture, "utf-8")
    except OSError as error:
        raise WeirError(f"cannot write to {out}: {error.strerror}") from None
    return [out / FORMATS[name] for name in wanted]


def _parts(done: Sequence[CellRecord]) -> Iterator[ReportPart]:
    for table in overviews(done):
        words = (
            f"{MARKS} Figures of several seeds are their means. {SURE} {CACHE} is a policy's "
            "largest cache over all tasks."
        )
        yield ReportPart(table.title, words, table=table)
    for table in across_models(done):
        words = (
            "How each policy changes a model's figures at the same bytes or slots: the ratio, or "
            "for shares of right answers the difference. Mean over the sizes of a model, and "
            f"then over models. {MARKS} {ACROSS}"
        )
        yield ReportPart(table.title, words, table=table)
    for table in by_distance(done):
        words = f"Share of right answers by distance. {MARKS} {SURE}"
        yield ReportPart(table.title, words, table=table)
    short = short_heads(list(unique(record["setting"] for record in done)))
    settings = group_by(done, "model", "protocol", "setting")
    for number, ((model, _, setting), mine) in enumerate(settings.items()):
        label = mine[0]["metric"]
        points = (
            f"{label} against the bytes of the cache; {mine[0]['better']} is better. Points of "
            "one policy with different budgets are joined. No other policy is better in both "
            "respects than the points on the gray line."
        )
        along = "Perplexity of each block of the text; lower is better."
        needles = "Share of needles found, by length and depth of the haystack."
        for kind, heading, picture, words in (
            ("pareto", f"{label} against bytes", plot_pareto(mine, label), points),
            ("along", "perplexity along the text", plot_along(mine), along),
            ("heat", "needles by length and depth", plot_heat(mine), needles),
        ):
            if picture is not None:
                title = f"{model}: {short[setting]}, {heading}"
                yield ReportPart(title, words, picture=picture, name=f"{kind}-{number}")


def _facts(cells: int, records: Sequence[CellRecord]) -> str:
    """A sentence about what was run."""

    def several(word: str, count: int) -> str:
        return f"{count} {word}{'' if count == 1 else 's'}"

    fields = ("model", "setting", "seed", "policy")
    *counts, policies = (len(unique(record[field] for record in records)) for field in fields)
    kinds = map(several, ("model", "task setting", "seed"), counts)
    failed = len(failures(records))
    done = len(records) - failed
    versions = ", ".join(unique(record["weir"] for record in records))
    return (
        f"{', '.join(kinds)}, policies and budgets: {policies}. Of "
        f"{several('cell', cells)}, {done} {'is' if done == 1 else 'are'} done and {failed} "
        f"failed. weir {versions}."
    )


def _html(
    parts: Sequence[ReportPart], facts: str, failed: Sequence[CellRecord], source: str
) -> str:
    body = []
    for part in parts:
        body.append(f"<h2>{html.escape(part.title)}</h2>\n<p>{html.escape(part.words)}</p>")
        if part.table is not None:
            body.append(as_html(part.table))
        if part.picture is not None:
            body.append(f"<figure>{part.picture}</figure>")
    if failed:
        rows = "".join(f"<li>{html.escape(_failure(record))}</li>" for record in failed)
        body.append(f"<h2>Failed</h2>\n<ul>{rows}</ul>")
    footer = f"Made by <code>weir report</code> from <code>{html.escape(source)}</code>."
    page = "\n".join([f"<p>{html.escape(facts)}</p>", *body])
    return html_page("weir: results", page, footer, heading="Results", style=STYLE)


def _markdown(
    parts: Sequence[ReportPart], facts: str, failed: Sequence[CellRecord], source: str
) -> str:
    body = ["# Results", facts]
    for part in parts:
        body += [f"## {part.title}", part.words]
        if part.table is not None:
            body.append(as_markdown(part.table))
        if part.picture is not None:
            body.append(f"![{part.title}]({part.name}.svg)")
    if failed:
        body += ["## Failed", "\n".join(f"- {_failure(record)}" for record in failed)]
    body.append(f"Made by `weir report` from `{source}`.")
    return "\n\n".join(body) + "\n"


def _failure(record: CellRecord) -> str:
    where = f"{record['setting']} of {record['model']} under {record['policy']}"
    return f"{where}, seed {record['seed']}: {record['reason']}"
