"""Tables as Markdown, HTML and LaTeX, the best in bold, the second underlined; and as CSV."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence

from weir.evals.results.summary import Table

BEST, SECOND = 1, 2


def as_markdown(table: Table) -> str:
    """A table in Markdown."""
    heads = ["policy", *(column.head for column in table.columns)]
    rules = ["---", *("---:" for _ in table.columns)]
    rows = [
        [_code(name), *cells]
        for name, cells in zip(table.rows, _cells(table, "**", "**"), strict=True)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows))


def as_html(table: Table) -> str:
    """A table in HTML."""
    heads = "".join(f"<th>{html.escape(column.head)}</th>" for column in table.columns)
    rows = [
        f"<tr><td><code>{html.escape(name)}</code></td>"
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
        for name, cells in zip(table.rows, _cells(table, "<b>", "</b>"), strict=True)
    ]
    return "\n".join(
        [
            '<div class="scroll"><table>',
            f"<thead><tr><th>policy</th>{heads}</tr></thead>",
            "<tbody>",
            *rows,
            "</tbody></table></div>",
        ]
    )


def _cells(table: Table, bold: str, unbold: str) -> list[list[str]]:
    """The figures row by row, the best and second best marked."""
    marks = {BEST: (bold, unbold), SECOND: ("<u>", "</u>")}
    found: list[list[str]] = [[] for _ in table.rows]
    for column in table.columns:
        places = column.places()
        for number, cells in enumerate(found):
            before, after = marks.get(places.get(number, 0), ("", ""))
            sure = column.sure(number)
            behind = f" <small>{sure}</small>" if sure else ""
            cells.append(f"{before}{column.written(number, group=',')}{after}{behind}")
    return found


def as_csv(tables: Sequence[Table]) -> str:
    """Tables as one of comma-separated values, a line a figure, none of them rounded."""
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


def as_latex(tables: Sequence[Table]) -> str:
    """Tables for a paper that loads booktabs: means, and below them 95 % intervals, sd and n."""
    return "% \\usepackage{booktabs}\n" + "\n".join(_latex(table) for table in tables)


def _latex(table: Table) -> str:
    heads = " & ".join(["policy", *(_tex(column.head) for column in table.columns)])
    body = []
    for row, name in enumerate(table.rows):
        cells, below = [], []
        for column in table.columns:
            place = column.places().get(row, 0)
            written = column.written(row, unknown="--", group="")
            mark = {BEST: r"\textbf{%s}", SECOND: r"\underline{%s}"}.get(place, "%s")
            cells.append(mark % written)
            sure = column.sure(row)
            below.append(rf"{{\scriptsize {_tex(sure)}}}" if sure else "")
        body.append(" & ".join([rf"\texttt{{{_tex(name)}}}", *cells]) + r" \\")
        if any(below):
            body.append(" & ".join(["", *below]) + r" \\")
    columns = "l" + "r" * len(table.columns)
    return "\n".join(
        [
            f"% {table.title}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            rf"{heads} \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


def _tex(text: str) -> str:
    """Text as LaTeX prints it."""
    special = {"\\": r"\textbackslash{}", "|": r"\textbar{}", "~": r"\textasciitilde{}"}
    special |= {"^": r"\textasciicircum{}", "–": "--", "<": r"\textless{}", ">": r"\textgreater{}"}
    special |= {mark: rf"\{mark}" for mark in "&%$#_{}"}
    return "".join(special.get(letter, letter) for letter in text)


def _code(name: str) -> str:
    """A policy in a cell; a bar in it would end the cell."""
    return f"<code>{name.replace('|', '&#124;')}</code>" if "|" in name else f"`{name}`"
