"""HTML pages, tables and pictures, shared by all commands that write reports.

This module makes figures as SVG, tables as HTML and Markdown, and HTML pages that hold their
pictures and follow the reader's light or dark setting. Six of the colors are from Okabe and Ito
2008, "Color Universal Design", which also has yellow and black; these two are left out, because
they are hard to see on a white or a dark page. Four more colors were added. Lines also differ in
marker or dash, never in color alone.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b", "#b81f5e",
    "#7b5fd6", "#86a800",
)  # fmt: skip
"""Blue, vermilion, green, purple, orange and sky blue, followed by brown, crimson, violet and olive
for more lines.
"""
DASHES: tuple[Any, ...] = ("-", "-", (0, (5, 3)), (0, (2, 2)), (0, (7, 2, 1, 2)), (0, (1, 3)))
"""Line styles. All but the first two have gaps, so that lines that overlap stay visible."""
MARKERS = "os^Dv<>PX"
INK, GRAY, LINE = "#1b2733", "#6b7680", "#dde2e6"
"""Colors of text and axes, of secondary text, and of the grid."""
NIGHT = {INK: "#e6eaee", GRAY: "#9aa5af", LINE: "#38424c"}
"""The same colors on a dark page."""
NAMES = {INK: "--ink", GRAY: "--gray", LINE: "--line"}
"""The names of these colors as CSS custom properties."""


@dataclass(frozen=True)
class TextTable:
    """A table of text; the first column names the rows.

    Attributes:
        heads: headings of the columns.
        rows: cells, row by row.
        markup: whether heads and cells are already HTML or Markdown and must not be escaped.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    markup: bool = False

    def html(self) -> str:
        """The table as HTML, in a box that scrolls sideways on a narrow screen."""
        shown = str if self.markup else html.escape
        heads = "".join(f"<th>{shown(head)}</th>" for head in self.heads)
        body = "\n".join(
            f"<tr>{''.join(f'<td>{shown(cell)}</td>' for cell in row)}</tr>" for row in self.rows
        )
        return (
            f'<div class="scroll"><table>\n<thead><tr>{heads}</tr></thead>\n'
            f"<tbody>\n{body}\n</tbody></table></div>"
        )

    def markdown(self) -> str:
        """The table as Markdown: first column left-aligned, the others right-aligned."""
        rules = ["---", *("---:" for _ in self.heads[1:])]
        return "\n".join(f"| {' | '.join(row)} |" for row in (self.heads, rules, *self.rows))


def code_cell(text: str) -> str:
    """Format a text as code in a cell of a Markdown table.

    A vertical bar would end the cell, and in backticks, some programs show the backslash that
    escapes it.
    """
    return f"<code>{text.replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def render(template: str, **values: Any) -> str:
    """Fill a Jinja template of this folder; values are escaped, except those marked as `safe`."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    text = (resources.files("weir.evals") / template).read_text("utf-8")
    return environment.from_string(text).render(values)


def html_page(title: str, body: str, footer: str, *, heading: str = "", style: str = "") -> str:
    """Make a whole HTML page from a body and a footer in HTML.

    `title` is the title of the window, and also the heading at the top if `heading` is empty.
    `style` is CSS that is added to that of all pages.
    """
    light = " ".join(f"{name}: {color};" for color, name in NAMES.items())
    dark = " ".join(f"{name}: {NIGHT[color]};" for color, name in NAMES.items())
    values = {"body": body, "footer": footer, "style": style, "light": light, "dark": dark}
    return render("page.html", title=title, heading=heading or title, **values)


def line_style(number: int) -> dict[str, Any]:
    """Return the color and marker of a line; the first ninety lines have different pairs."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


class DrawnFigure:
    """A drawn figure, as an SVG element for a page and as PDF for a paper.

    Attributes:
        figure: matplotlib's figure.
        svg: the element; empty until `draw` is called. Its background is transparent. Text and
            lines have the light or dark colors of the page. If the picture is a separate file, they
            follow the reader's light or dark setting.
    """

    def __init__(self, figure: Figure, style: Any) -> None:
        self.figure, self._style, self.svg = figure, style, ""

    def draw(self) -> None:
        """Make `svg` from the figure."""
        target = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        self.figure.savefig(target, format="svg", transparent=True, metadata=metadata)
        svg = target.getvalue()
        self.svg = _with_page_colors(re.sub(r' id="[a-z0-9.]+_\d+"', "", svg[svg.index("<svg") :]))

    def pdf(self) -> bytes:
        """The picture as PDF, with text as text and the same bytes from run to run."""
        import matplotlib as mpl

        target = io.BytesIO()
        with mpl.rc_context(self._style):
            self.figure.savefig(target, format="pdf", transparent=True, metadata=NO_DATE)
        return target.getvalue()


NO_DATE: dict[str, Any] = {"CreationDate": None}
"""Metadata for PDF files, without a date, so that two runs write the same bytes."""


@contextmanager
def drawn_figure(salt: str, width: float, height: float) -> Iterator[tuple[Figure, DrawnFigure]]:
    """Provide an empty figure of a size in inches, and a picture whose `svg` is made on exit.

    `salt` makes ids unique among the pictures of a page, and equal from run to run.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Use fonts of type 42, because many journals refuse those of type 3.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": salt, "pdf.fonttype": 42, "font.size": 10}
    for part in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        style[part] = INK
    with mpl.rc_context(style):
        picture = DrawnFigure(Figure(figsize=(width, height), layout="constrained"), style)
        yield picture.figure, picture
        picture.draw()


def _with_page_colors(svg: str) -> str:
    """Let text and lines of a picture take the colors of the page that it is in. A picture in a
    separate file has its own light and dark colors.
    """
    for color, name in NAMES.items():
        svg = svg.replace(color, f"var({name}, {color})")
    dark = "; ".join(f"{name}: {NIGHT[color]}" for color, name in NAMES.items())
    style = f"<style>@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    head, mark, rest = svg.partition(">")
    return f"{head}{mark}{style}{rest}"


def style_axes(axes: Axes, *, vertical: bool = True) -> None:
    """Style linear or logarithmic axes: plain numbers, a grid behind the data, and no lines at the
    top and right. Without `vertical`, the grid has only horizontal lines.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(axis="both" if vertical else "y", color=LINE, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def needs_log_scale(values: Sequence[float], ratio: float) -> bool:
    """Whether the smallest value is positive and the largest more than `ratio` times it."""
    return bool(values) and min(values) > 0 and max(values) > ratio * min(values)


SPIKE = 2.0
"""A value is a spike if it is more than this many times the middle one of the curves' medians."""


def readable_range(curves: Sequence[Sequence[float | None]]) -> tuple[float, float] | None:
    """Return the ends of an axis on which spikes do not flatten the other curves; None without
    spikes.
    """
    known = [[v for v in curve if v is not None] for curve in curves]
    middles = sorted(median(curve) for curve in known if curve)
    if not middles:
        return None
    most = SPIKE * middles[(len(middles) - 1) // 2]
    values = [v for curve in known for v in curve]
    shown = [v for v in values if v <= most]
    if len(shown) == len(values) or not shown:
        return None
    margin = 0.06 * (max(shown) - min(shown) or max(shown))
    return min(shown) - margin, max(shown) + margin


def with_peak(name: str, curve: Sequence[float | None], shown: tuple[float, float] | None) -> str:
    """Return the name of a curve for a legend, with its highest value if the axis does not show
    it.
    """
    peak = max((v for v in curve if v is not None), default=0.0)
    return name if shown is None or peak <= shown[1] else f"{name}, up to {peak:,.0f}"


def legend_columns(names: Sequence[str], width: float, points: float) -> int:
    """Return how many columns of a legend, from 1 to 3, fit into a width in inches, with letters of
    a size in points.
    """
    letters = max(map(len, names), default=1) + 6  # the line and the gap take the space of six
    return max(1, min(3, len(names), int(72 * width / (0.58 * points * letters))))


def whole_blocks(values: Sequence[T], tokens: int, block: int) -> Sequence[T]:
    """Return the values of whole blocks of a text; all values if no block is whole.

    The perplexity of a short last block says little, so it is not compared with others.
    """
    whole = tokens // block
    return values[:whole] if whole else values
