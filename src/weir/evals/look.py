"""How pictures look: colors that everybody can tell apart, and SVG for pages light and dark.

The colors are those of Okabe and Ito 2008, "Color Universal Design", without yellow and black,
which paper and night swallow. Lines differ in marker or dash too, never in color alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a6d3b")
"""Blue, vermilion, green, purple, orange, sky blue; and a brown, for the seventh."""
DASHES: tuple[Any, ...] = ("-", "-", (0, (5, 3)), (0, (2, 2)), (0, (7, 2, 1, 2)), (0, (1, 3)))
"""Beside the colors, so that of lines on top of each other all are seen."""
MARKERS = "os^Dv<>PX"
INK, GRAY, LINE = "#1b2733", "#6b7680", "#dde2e6"
"""Of letters and axes, of what stands beside, of the grid."""
NIGHT = {INK: "#e6eaee", GRAY: "#9aa5af", LINE: "#38424c"}
"""The same on a dark page."""
NAMES = {INK: "--ink", GRAY: "--gray", LINE: "--line"}
"""What a page's style sheet calls them."""


def look(number: int) -> dict[str, Any]:
    """A color and a marker that no other of sixty lines has both of."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


@contextmanager
def drawing(salt: str, width: float, height: float) -> Iterator[tuple[Figure, list[str]]]:
    """A figure to draw into; what follows it in the list, afterwards, is its SVG element.

    Its paper is transparent, and letters and lines follow the page between light and dark, or the
    reader's own setting where the picture is a file by itself.

    Args:
        salt: keeps the names inside the pictures of a page apart, and the same from run to run.
        width, height: inches; letters have 10 points.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10}
    for part in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"):
        style[part] = INK
    with mpl.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        out: list[str] = []
        yield figure, out
        target = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(target, format="svg", transparent=True, metadata=nothing)
    svg = target.getvalue()
    out.append(_following(re.sub(r' id="[a-z0-9.]+_\d+"', "", svg[svg.index("<svg") :])))


def dress(axes: Axes, *, across: bool = True) -> None:
    """A grid behind the figures, numbers as people write them, and no frame.

    Args:
        axes: of which at least one scale may be logarithmic.
        across: the grid has upright lines too.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(axis="both" if across else "y", color=LINE, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def is_far(values: Sequence[float], far: float) -> bool:
    """Whether figures span so many times the smallest that only a logarithmic scale shows all."""
    return bool(values) and min(values) > 0 and max(values) > far * min(values)


def page_colors() -> str:
    """What gives a page's letters and lines their colors in its style sheet, light and dark."""
    light = " ".join(f"{name}: {color};" for color, name in NAMES.items())
    dark = " ".join(f"{name}: {NIGHT[color]};" for color, name in NAMES.items())
    return (
        f":root {{ color-scheme: light dark; --paper: #fdfdfc; {light} }}\n"
        f"  @media (prefers-color-scheme: dark) {{ :root {{ --paper: #14191f; {dark} }} }}"
    )


def _following(svg: str) -> str:
    """A picture whose letters and lines have the page's colors, or by itself its own."""
    for color, name in NAMES.items():
        svg = svg.replace(color, f"var({name}, {color})")
    dark = "; ".join(f"{name}: {NIGHT[color]}" for color, name in NAMES.items())
    style = f"<style>@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>"
    head, mark, rest = svg.partition(">")
    return f"{head}{mark}{style}{rest}"
