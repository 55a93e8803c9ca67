"""Reports of results: one HTML page with its plots inside, Markdown, CSV, LaTeX and PDF."""

from __future__ import annotations

import csv
import html
import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from weir.errors import WeirError, in_words
from weir.evals.report import (
    DASHES,
    GRAY,
    NO_DATE,
    DrawnFigure,
    TextTable,
    code_cell,
    drawn_figure,
    html_page,
    legend_columns,
    line_style,
    needs_log_scale,
    readable_range,
    style_axes,
    whole_blocks,
    with_peak,
)
from weir.evals.results.citing import as_bibtex, cited, unread
from weir.evals.results.file import CellRecord, failures, unique
from weir.evals.results.naming import read_together
from weir.evals.results.summary import (
    CACHE,
    FigureTable,
    across_models,
    by_distance,
    group_by,
    overviews,
    paired,
    short_heads,
    strip_budget,
)
from weir.evals.scores import wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def as_markdown(table: FigureTable) -> str:
    """A table in Markdown."""
    rows = _rows(table, "**%s**", "<u>%s</u>", " <small>%s</small>", group=",")
    cells = [[code_cell(name), *map("".join, row)] for name, row in rows]
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
    """Return each policy with its figures and their intervals, empty if there are none.

    `best` and `second` are the formats of the best and second-best figures, and `sure` is that of
    intervals. `how` is passed to `Column.written`.
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
    """Write tables as comma-separated values, one unrounded figure per line."""
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
    """Write tables for a paper that loads booktabs: means, with 95 % intervals, sd and n below."""
    return "% \\usepackage{booktabs}\n" + "\n".join(_latex(table) for table in tables)


def _latex(table: FigureTable) -> str:
    heads = " & ".join(["policy", *(_tex(column.head) for column in table.columns)])
    body = []
    marks = r"\textbf{%s}", r"\underline{%s}", r"{\scriptsize %s}"
    for name, cells in _rows(table, *marks, unknown="--"):
        figures, below = zip(*cells, strict=True)
        body.append(" & ".join([rf"\texttt{{{_tex(name)}}}", *map(_minus, figures)]) + r" \\")
        if any(below):
            body.append(" & ".join(["", *map(_minus, below)]) + r" \\")
    begin = rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}"
    top = [f"% {table.title}", begin, r"\toprule", rf"{heads} \\", r"\midrule"]
    return "\n".join([*top, *body, r"\bottomrule", r"\end{tabular}", ""])


def _minus(cell: str) -> str:
    """Write negative numbers of a cell with a minus sign, which LaTeX does not make of `-`."""
    return re.sub(r"(?<![\w-])-(?=\d)", r"{\\textminus}", cell)


def _tex(text: str) -> str:
    """Escape text for LaTeX."""
    special = {"\\": r"\textbackslash{}", "|": r"\textbar{}", "~": r"\textasciitilde{}"}
    special |= {"^": r"\textasciicircum{}", "–": "--", "<": r"\textless{}", ">": r"\textgreater{}"}
    special |= {mark: rf"\{mark}" for mark in "&%$#_{}"}
    return "".join(special.get(letter, letter) for letter in text)


WIDTH = 7.6
"""Width of a picture in inches."""
FAR = 20.0
"""A scale is logarithmic if the largest figure is more than this many times the smallest."""
FAR_BYTES = 10.0
"""The same for bytes, where a linear scale with exact attention on it would crowd policies of a few
hundred slots together.
"""


def family(policy: str) -> str:
    """Return the name that policies of different budgets share: the policy without its budget. For
    a pipe, this is the whole pipe.

    For a policy from which no budget can be removed, this is the name before the parenthesis.
    """
    plain = strip_budget(policy)
    return plain if plain != policy or "|" in policy else policy.partition("(")[0]


def pareto_front(points: Sequence[tuple[float, float]], higher: bool) -> list[int]:
    """Return the indices of the points (bytes, quality) that no other point beats in both, by
    rising bytes.
    """
    costs = [(nbytes, -quality if higher else quality) for nbytes, quality in points]
    best: list[int] = []
    for i in sorted(range(len(points)), key=costs.__getitem__):
        if not best or costs[i][1] < costs[best[-1]][1]:
            best.append(i)
    return best


BASELINE = "dense"
"""The policy that keeps everything. It can be so far from all others that they would be crowded
into one corner of a picture.
"""
FARTHER = 2.0
"""The baseline is left out if it would make an axis more than this many times as long."""


def plot_pareto(records: Sequence[CellRecord], label: str) -> DrawnFigure | None:
    """Plot figures against cache bytes. A line joins a policy's budgets; the Pareto front is gray.

    The records are of one model and setting. Returns None if fewer than two policies have both a
    figure and bytes. If the baseline is far from all others, the axes fit the others, and the
    legend has the baseline's figures.
    """
    of_policy = group_by((r for r in records if r["value"] is not None and r["kv_bytes"]), "policy")
    if len(of_policy) < 2:
        return None
    found: dict[str, list[tuple[float, float]]] = {}
    for (policy,), rows in of_policy.items():
        point = max(r["kv_bytes"] for r in rows) / 1e6, mean(r["value"] for r in rows)
        found.setdefault(family(policy), []).append(point)
    drawn = {name: points for name, points in found.items() if name != BASELINE}
    left_out = BASELINE in found and _is_far(
        found[BASELINE], list(itertools.chain(*drawn.values()))
    )
    drawn = drawn if left_out else found
    points = list(itertools.chain(*drawn.values()))
    names = [name if name in drawn else _written(name, found[name]) for name in found]
    columns = legend_columns(["not beaten in both", *names], WIDTH, LETTERS)
    with drawn_figure(f"pareto{label}", WIDTH, _height(len(names) + 1, columns)) as drawing:
        figure, picture = drawing
        axes = figure.subplots()
        best = [points[i] for i in pareto_front(points, records[0]["better"] == "higher")]
        front: dict[str, Any] = {"color": GRAY, "lw": 5, "alpha": 0.25, "zorder": 1}
        axes.plot(*zip(*best, strict=True), **front, label="not beaten in both")
        for number, (kind, name) in enumerate(zip(found, names, strict=True)):
            mine = sorted(drawn.get(kind, []))
            x, y = zip(*mine, strict=True) if mine else ((), ())
            axes.plot(x, y, lw=1.2, ms=6, label=name, **line_style(number))
        _dress_axes(axes, "cache, MB", label, *zip(*points, strict=True), columns=columns)
    return picture


def _is_far(base: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> bool:
    """Whether `base` would make an axis so long that the other points are hard to tell apart."""
    for mine, theirs in zip(zip(*base, strict=True), zip(*others, strict=True), strict=True):
        span = max(theirs) - min(theirs)
        if span and max(*mine, *theirs) - min(*mine, *theirs) > FARTHER * span:
            return True
    return False


def _written(name: str, points: Sequence[tuple[float, float]]) -> str:
    """Describe a policy that is not drawn, with its figures."""
    each = "; ".join(f"{value:,.4g} in {megabytes:,.1f} MB" for megabytes, value in points)
    return f"{name}, not drawn: {each}"


def plot_along(records: Sequence[CellRecord]) -> DrawnFigure | None:
    """Plot perplexity by whole block of a text, a line per policy; None if no text has two blocks.

    The records are of one model and setting. Only the first seed is drawn.
    """
    rows = [r for r in records if len(r["result"].get("ppl_by_block", ())) > 1]
    results = {policy: mine[0]["result"] for (policy,), mine in group_by(rows, "policy").items()}
    if not results:
        return None
    curves = {
        policy: whole_blocks(result["ppl_by_block"], result["tokens"], result["block"])
        for policy, result in results.items()
    }
    shown = readable_range(list(curves.values()))
    names = {policy: with_peak(policy, curve, shown) for policy, curve in curves.items()}
    # Budgets of a policy have the same color, as in `plot_pareto`, and differ in their dashes.
    families: dict[str, list[str]] = {}
    for policy in curves:
        families.setdefault(family(policy), []).append(policy)
    columns = legend_columns(list(names.values()), WIDTH, LETTERS)
    with drawn_figure("along", WIDTH, _height(len(names), columns)) as (figure, picture):
        axes = figure.subplots()
        for policy, values in curves.items():
            number, kin = list(families).index(family(policy)), families[family(policy)]
            dashes = DASHES[1:][kin.index(policy) % (len(DASHES) - 1)]
            result = results[policy]
            edges = [min(i * result["block"], result["tokens"]) for i in range(len(values) + 1)]
            middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
            # The markers of many blocks would merge into a band.
            often = max(1, len(values) // 8) if len(values) > 25 else 1
            how = {"lw": 1.4, "ms": 4, "ls": dashes, "markevery": often, **line_style(number)}
            axes.plot(middles, values, label=names[policy], **how)
        _dress_axes(axes, "tokens read", "perplexity", (), (), columns=columns)
        if shown is not None:
            axes.set_ylim(*shown)
    return picture


def plot_heat(records: Sequence[CellRecord]) -> DrawnFigure | None:
    """Plot heat maps of accuracy by length and depth, a panel per policy; None without such cells.

    The records are of one model and setting. The mean over seeds is drawn.
    """
    of_policy = group_by((r for r in records if r["result"].get("cells")), "policy")
    if not of_policy:
        return None
    across = min(3, len(of_policy))
    down = -(-len(of_policy) // across)
    with drawn_figure("heat", WIDTH, 1.9 * down + 0.6) as (figure, picture):
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
    return picture


FORMS = {
    "once": "told once",
    "changed": "changed since",
    "several": "three facts in a sentence",
    "paraphrased": "in other words",
    "sessions": "two things, told apart",
    "order": "which was told first",
}
"""Names of the forms of the task `recalled` in pictures. The form `never` is left out, because
questions about facts that were never told have no right answer.
"""
WAYS = {"recall": "with recall", "none": "without", "plain": "retrieval, no cache"}
"""Names of the ways in which `recalled` has questions answered, in pictures."""


def plot_recalled(records: Sequence[CellRecord]) -> DrawnFigure | None:
    """Plot right answers over the distance, a panel for each form and a line for each way of
    answering (`WAYS`); None without results of `recalled`.

    The records are of one model. The legend names policies if there are several.
    """
    rows = [
        {**row, "policy": record["policy"]}
        for record in records
        for row in record["result"].get("by_form", ())
        if "way" in row and row["form"] in FORMS and row["asked"]
    ]
    if not rows:
        return None
    forms = [form for form in FORMS if any(row["form"] == form for row in rows)]
    lines = unique((row["policy"], row["way"]) for row in rows)
    several = len(unique(policy for policy, _ in lines)) > 1
    distances = sorted({row["distance"] for row in rows})
    nearest, farthest = distances[0], distances[-1]
    with drawn_figure("recalled", WIDTH, _height(len(lines), 3) - 0.4) as (figure, picture):
        panels = figure.subplots(1, len(forms), squeeze=False, sharey=True)[0]
        for axes, form in zip(panels, forms, strict=True):
            for number, (policy, way) in enumerate(lines):
                of_line = [r for r in rows if (r["policy"], r["way"]) == (policy, way)]
                points = group_by((r for r in of_line if r["form"] == form), "distance")
                counts = {
                    distance: (sum(r["right"] for r in mine), sum(r["asked"] for r in mine))
                    for (distance,), mine in sorted(points.items())
                }
                shares = [right / asked for right, asked in counts.values()]
                sure = [wilson(right, asked) for right, asked in counts.values()]
                below = [share - low for share, (low, _) in zip(shares, sure, strict=True)]
                above = [high - share for share, (_, high) in zip(shares, sure, strict=True)]
                name = WAYS.get(way, way)
                label = f"{policy}, {name}" if several else name
                how = {"lw": 1.4, "ms": 5, "capsize": 2, "elinewidth": 0.8, **line_style(number)}
                if form != forms[0]:
                    label = "_"  # the first panel has put it into the legend
                axes.errorbar(list(counts), shares, yerr=[below, above], label=label, **how)
            axes.set_xscale("log")
            axes.set_xlim(nearest / 2, 2 * farthest)
            axes.set_ylim(-0.03, 1.03)
            axes.set_title(FORMS[form], fontsize=9)
            style_axes(axes)
            axes.set_xticks(distances, map(_shorten, distances), fontsize=8)
            axes.minorticks_off()
        panels[0].set_ylabel("right answers")
        figure.supxlabel("tokens since the fact", fontsize=9)
        figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=3)
    return picture


def _shorten(count: int) -> str:
    """Format a number of tokens for an axis: 10000 is 10k."""
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:g}{letter}"
    return str(count)


def _share(cells: Sequence[dict[str, Any]]) -> float:
    """Return the mean accuracy of cells; NaN if there are none, which leaves a gap."""
    return float(mean(cell["accuracy"] for cell in cells)) if cells else math.nan


LETTERS = 8
"""Size of the letters of a legend, in points."""


def _height(names: int, columns: int) -> float:
    """Return the height in inches of a picture with a legend of so many names below it."""
    return 3.4 + 0.17 * -(-names // columns)


def _dress_axes(
    axes: Axes, across: str, up: str, x: Sequence[float], y: Sequence[float], *, columns: int
) -> None:
    """Label, scale and style axes, and put the legend below them, where it hides no point."""
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    if needs_log_scale(x, FAR_BYTES):
        axes.set_xscale("log")
    if needs_log_scale(y, FAR):
        axes.set_yscale("log")
    style_axes(axes)
    axes.figure.legend(loc="outside lower left", frameon=False, fontsize=LETTERS, ncols=columns)


FORMATS = {
    "html": "report.html",
    "md": "report.md",
    "csv": "tables.csv",
    "latex": "tables.tex",
    "pdf": "report.pdf",
    "bib": "references.bib",
}
"""The file name of each format of a report."""
USUAL = ("html", "md")
MARKS = "Bold is best, underlined second best."
SURE = (
    "After each figure come its 95 % interval, the standard deviation over seeds, and n, the "
    "number of answers, seeds or blocks. The interval is Wilson's for counted answers, and "
    "Student's over seeds. For a perplexity of one seed, it is Student's over the whole blocks of "
    "the text. A figure without an interval was measured once, or in fewer than "
    "five blocks."
)

STYLE = "body { max-width: 60rem; } svg { min-width: 30rem; }"
"""CSS for wide tables and pictures."""
ACROSS = (
    "After each figure come Student's 95 % interval and the standard deviation over the models, "
    "and n, the number of models."
)


CITE = (
    "The descriptions of the policies and pools that ran name these papers. --format bib writes "
    "BibTeX entries for them and for weir; complete the authors before you publish."
)
PAIRED = (
    "Each policy is compared with streaming_llm at the same bytes or slots, or if only one "
    "streaming_llm was measured, with that one. The figure is the ratio of the two, or for shares "
    "of right answers the difference. Both read the same text and answer the same questions, so "
    "the 95 % interval is that of the pairs: Student's over blocks of the text, over books or "
    "over seeds, and Newcombe's for answers. n counts the pairs. If the interval contains 1 (for "
    "a ratio) or 0 (for a difference), this measurement does not tell the two policies apart."
)


@dataclass(frozen=True)
class ReportPart:
    """A part of a report.

    Attributes:
        title: the heading.
        words: the explanation below the heading.
        table: a table, if the part has one.
        picture: a picture, if the part has one.
        name: name of the picture's files, without the suffix.
    """

    title: str
    words: str
    table: FigureTable | None = None
    picture: DrawnFigure | None = None
    name: str = ""


def write_report(
    results: Path | Sequence[Path], out: Path, formats: Sequence[str] = USUAL
) -> list[Path]:
    r"""Write a report in several formats.

    `report.html` has its pictures inside; those of `report.md` are SVG files next to it.
    `report.pdf` has everything, and each picture is also written as a separate PDF, for
    `\includegraphics`.

    Args:
        results: one or several files of `weir eval`, which may still be growing.
        out: output folder, created if missing.
        formats: names from `FORMATS`; `csv` and `latex` have only the tables, and `bib` has only
            the papers.

    Returns:
        The path of the file of each format; files of single pictures are not included.

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
    papers = cited(
        unique(
            str(text)
            for r in done
            for text in (r.get("written") or r["policy"], r.get("pools"))
            if text is not None
        )
    )
    if missing := unread(unique(str(r.get("written") or r["policy"]) for r in done)):
        warnings.warn(
            f"weir: no papers are cited for {', '.join(missing)}, because these policies are not "
            "known here. If a file of yours defines them, use weir --import FILE report.",
            stacklevel=2,
        )
    references = [str(paper) for paper in papers]
    page = (parts, _facts(cells, records), references, failures(records), source)
    renderers: dict[str, Callable[[], bytes]] = {
        "html": lambda: _html(*page).encode(),
        "md": lambda: _markdown(*page).encode(),
        "csv": lambda: as_csv(tables).encode(),
        "latex": lambda: as_latex(tables).encode(),
        "pdf": lambda: _pdf(*page),
        "bib": lambda: as_bibtex(list(papers)).encode(),
    }
    if out.exists() and not out.is_dir():
        raise WeirError(f"{out} is a file, and --out must be a folder. Use another name.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        wanted = [name for name in FORMATS if name in formats]
        for name in wanted:
            (out / FORMATS[name]).write_bytes(renderers[name]())
        for part in parts:
            if part.picture is not None and "md" in formats:
                (out / f"{part.name}.svg").write_text(part.picture.svg, "utf-8")
            if part.picture is not None and "pdf" in formats:
                (out / f"{part.name}.pdf").write_bytes(part.picture.pdf())
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
    for table in paired(done):
        yield ReportPart(table.title, PAIRED, table=table)
    for table in across_models(done):
        words = (
            "How each policy changes a model's figures at the same bytes or slots: the ratio, or "
            "for shares of right answers the difference. A model's figure is the mean over its "
            f"sizes of the cache, and the table has the mean over models. {MARKS} {ACROSS}"
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
            f"{label} against the bytes of the cache; {mine[0]['better']} is better. Points of one "
            "policy with different budgets are joined. The gray line joins the points that no "
            f"other point in the picture beats in both {label} and bytes. If {BASELINE} is far "
            "from all others, the axes leave it out, and the legend has its figures."
        )
        along = (
            "Perplexity of each block of the text; lower is better. If a curve leaves the picture "
            "at the top, the legend has its highest value."
        )
        needles = "Share of needles found, by length and depth of the haystack."
        for kind, heading, picture, words in (
            ("pareto", f"{label} against bytes", plot_pareto(mine, label), points),
            ("along", "perplexity along the text", plot_along(mine), along),
            ("heat", "needles by length and depth", plot_heat(mine), needles),
        ):
            if picture is not None:
                title = f"{model}: {short[setting]}, {heading}"
                yield ReportPart(title, words, picture=picture, name=f"{kind}-{number}")
    yield from _recalled_parts(done)


def _recalled_parts(done: Sequence[CellRecord]) -> Iterator[ReportPart]:
    for number, ((model,), mine) in enumerate(group_by(done, "model").items()):
        if (picture := plot_recalled(mine)) is not None:
            words = (
                "Share of right answers by the tokens that were read since the fact was told, with "
                "95 % intervals (Wilson's)."
            )
            title = f"{model}: facts from the archive"
            yield ReportPart(title, words, picture=picture, name=f"recalled-{number}")


def _facts(cells: int, records: Sequence[CellRecord]) -> str:
    """Write a sentence about what was run."""
    fields = ("model", "setting", "seed", "policy")
    *counts, policies = (len(unique(record[field] for record in records)) for field in fields)
    kinds = map(in_words, counts, ("model", "task setting", "seed"))
    failed = len(failures(records))
    done = len(records) - failed
    versions = ", ".join(unique(record["weir"] for record in records))
    return (
        f"{', '.join(kinds)}, {in_words(policies, 'combination')} of policy and budget. Of "
        f"{in_words(cells, 'cell')}, {done} {'is' if done == 1 else 'are'} done and {failed} "
        f"failed. weir {versions}."
    )


def _html(
    parts: Sequence[ReportPart],
    facts: str,
    references: Sequence[str],
    failed: Sequence[CellRecord],
    source: str,
) -> str:
    body = []
    for part in parts:
        body.append(f"<h2>{html.escape(part.title)}</h2>\n<p>{html.escape(part.words)}</p>")
        if part.table is not None:
            body.append(as_html(part.table))
        if part.picture is not None:
            body.append(f"<figure>{part.picture.svg}</figure>")
    if references:
        rows = "".join(f"<li>{html.escape(one)}</li>" for one in references)
        body.append(f"<h2>Papers to cite</h2>\n<p>{CITE}</p>\n<ul>{rows}</ul>")
    if failed:
        rows = "".join(f"<li>{html.escape(_failure(record))}</li>" for record in failed)
        body.append(f"<h2>Failed</h2>\n<ul>{rows}</ul>")
    footer = f"Made by <code>weir report</code> from <code>{html.escape(source)}</code>."
    page = "\n".join([f"<p>{html.escape(facts)}</p>", *body])
    return html_page("weir: results", page, footer, heading="Results", style=STYLE)


def _pdf(
    parts: Sequence[ReportPart],
    facts: str,
    references: Sequence[str],
    failed: Sequence[CellRecord],
    source: str,
) -> bytes:
    """Write the report as PDF, with a page for each part. This does not need TeX."""
    import matplotlib as mpl
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure

    texts = [("Results", [facts, f"Made by weir report from {source}."])]
    if references:
        texts.append(("Papers to cite", [CITE, *references]))
    if failed:
        texts.append(("Failed", [_failure(record) for record in failed]))
    target = io.BytesIO()
    with (
        mpl.rc_context({"pdf.fonttype": 42, "font.size": 10}),
        PdfPages(target, metadata=NO_DATE) as pages,
    ):

        def write(title: str, words: Sequence[str], table: Sequence[str] = ()) -> None:
            """Add a page of text, whose size fits the text."""
            lines = [line for each in words for line in textwrap.wrap(each, 100)]
            widest = max(map(len, (*lines, *table, title)))
            height = 0.7 + LINE_INCHES * (len(lines) + len(table) + 3)
            figure = Figure(figsize=(max(6.0, 0.8 + LETTER_INCHES * widest), height))
            figure.text(
                0.4 / figure.get_figwidth(), 1 - 0.4 / height, title, weight="bold", va="top"
            )
            rest = "\n".join([*lines, "", *table])
            mono: dict[str, Any] = {
                "family": "monospace",
                "fontsize": LETTERS,
                "va": "top",
                "linespacing": 1.3,
            }
            figure.text(0.4 / figure.get_figwidth(), 1 - 0.8 / height, _plain(rest), **mono)
            pages.savefig(figure)

        for heading, paragraphs in texts:
            write(heading, paragraphs)
        for part in parts:
            if part.table is not None:
                words = part.words.replace(MARKS, "A star marks the best.")
                write(part.title, [words], as_lines(part.table))
            if part.picture is not None:
                above = part.picture.figure.suptitle(_plain(part.title), fontsize=10)
                pages.savefig(part.picture.figure)
                above.remove()
    return target.getvalue()


LINE_INCHES = 0.16
LETTER_INCHES = 0.069
"""Height of a line and width of a letter in the text of a PDF, in inches."""


def _plain(text: str) -> str:
    """Escape dollar signs, because matplotlib typesets text between them as mathematics."""
    return text.replace("$", r"\$")


def as_lines(table: FigureTable) -> list[str]:
    """Write a table in monospaced columns; the best figures have a star, and intervals are
    below.
    """
    rows = [["policy", *(column.head for column in table.columns)]]
    for name, cells in _rows(table, "*%s", "%s", "%s", group=","):
        rows.append([name, *(figure for figure, _ in cells)])
        if any(sure for _, sure in cells):
            rows.append(["", *(sure for _, sure in cells)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if n == 0 else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _markdown(
    parts: Sequence[ReportPart],
    facts: str,
    references: Sequence[str],
    failed: Sequence[CellRecord],
    source: str,
) -> str:
    body = ["# Results", facts]
    for part in parts:
        body += [f"## {part.title}", part.words]
        if part.table is not None:
            body.append(as_markdown(part.table))
        if part.picture is not None:
            body.append(f"![{part.title}]({part.name}.svg)")
    if references:
        body += ["## Papers to cite", CITE, "\n".join(f"- {one}" for one in references)]
    if failed:
        body += ["## Failed", "\n".join(f"- {_failure(record)}" for record in failed)]
    body.append(f"Made by `weir report` from `{source}`.")
    return "\n\n".join(body) + "\n"


def _failure(record: CellRecord) -> str:
    where = f"{record['setting']} of {record['model']} under {record['policy']}"
    return f"{where}, seed {record['seed']}: {record['reason']}"
