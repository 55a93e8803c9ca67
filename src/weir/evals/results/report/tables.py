"""Tables as Markdown and as HTML: the best figure of a column in bold, the second underlined."""

from __future__ import annotations

import html

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
            cells.append(f"{before}{column.written(number, group=',')}{after}")
    return found


def _code(name: str) -> str:
    """A policy in a cell; a bar in it would end the cell."""
    return f"<code>{name.replace('|', '&#124;')}</code>" if "|" in name else f"`{name}`"
