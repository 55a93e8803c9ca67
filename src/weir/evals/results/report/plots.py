"""Pictures of results, as SVG elements: quality against bytes, perplexity by place, heat maps."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mean
from typing import TYPE_CHECKING, Any

from weir.evals.results.file import CellRecord, unique
from weir.evals.results.summary import grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY = "#77828c"
MARKERS = "os^Dv<>PX"
FAR = 20.0
"""From such a ratio of the largest figure to the smallest on, a scale is logarithmic."""
FAR_BYTES = 10.0
"""The same of bytes: policies of some hundred slots and exact attention are farther apart."""


def family(policy: str) -> str:
    """What policies of different budgets have in common: a named policy's name; a pipe itself."""
    return policy if " | " in policy else policy.partition("(")[0]


def front(points: Sequence[tuple[float, float]], higher: bool) -> list[int]:
    """Of points (bytes, quality), those that none beats in both, from the smallest on."""
    order = sorted(
        range(len(points)), key=lambda i: (points[i][0], -points[i][1] if higher else points[i][1])
    )
    best: list[int] = []
    for i in order:
        if not best or (
            points[i][1] > points[best[-1]][1] if higher else points[i][1] < points[best[-1]][1]
        ):
            best.append(i)
    return best


def pareto(records: Sequence[CellRecord], label: str) -> str | None:
    """Every policy's figure against the bytes of its cache, budgets joined; the front in grey.

    Args:
        records: of one model and one setting.
        label: what is measured.

    Returns:
        The picture; None where fewer than two policies have both figures.
    """
    of_policy = grouped((r for r in records if r["value"] is not None and r["kv_bytes"]), "policy")
    if len(of_policy) < 2:
        return None
    points = {
        policy: (max(r["kv_bytes"] for r in rows) / 1e6, mean(r["value"] for r in rows))
        for (policy,), rows in of_policy.items()
    }
    names = list(points)
    with _drawing(f"pareto{label}", 3.8) as (figure, out):
        axes = figure.subplots()
        higher = records[0]["better"] == "higher"
        best = [points[names[i]] for i in front(list(points.values()), higher)]
        axes.plot(
            *zip(*best, strict=True),
            color=GREY,
            lw=5,
            alpha=0.25,
            zorder=1,
            label="not beaten in both",
        )
        for number, kind in enumerate(unique(family(name) for name in names)):
            mine = sorted(points[name] for name in names if family(name) == kind)
            axes.plot(*zip(*mine, strict=True), lw=1.2, ms=6, label=kind, **_look(number))
        _scales(axes, [x for x, _ in points.values()], [y for _, y in points.values()])
        axes.set_xlabel("cache, MB")
        axes.set_ylabel(label)
        _dress(axes)
    return out[0]


def along(records: Sequence[CellRecord]) -> str | None:
    """Perplexity of each block of a text, a line per policy; None where there are no blocks.

    Args:
        records: of one model and one setting; of several seeds the first is drawn.
    """
    rows = [r for r in records if len(r["result"].get("ppl_by_block", ())) > 1]
    of_policy = grouped(rows, "policy")
    if not of_policy:
        return None
    with _drawing("along", 3.6) as (figure, out):
        axes = figure.subplots()
        every = []
        for number, ((policy,), mine) in enumerate(of_policy.items()):
            result = mine[0]["result"]
            values = result["ppl_by_block"]
            edges = [min(i * result["block"], result["tokens"]) for i in range(len(values) + 1)]
            middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
            look = _look(number)
            look["marker"] = "" if len(values) > 25 else look["marker"]
            axes.plot(middles, values, lw=1.4, ms=3, label=policy, **look)
            every += [v for v in values if v is not None]
        _scales(axes, [], every)
        axes.set_xlabel("tokens read")
        axes.set_ylabel("perplexity")
        _dress(axes)
    return out[0]


def heat(records: Sequence[CellRecord]) -> str | None:
    """What was found by length and depth, a panel per policy; None where there are no such cells.

    Args:
        records: of one model and one setting; of several seeds the mean is drawn.
    """
    of_policy = grouped((r for r in records if r["result"].get("cells")), "policy")
    if not of_policy:
        return None
    across = min(3, len(of_policy))
    down = -(-len(of_policy) // across)
    with _drawing("heat", 1.9 * down + 0.6) as (figure, out):
        panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flatten()
        for axes in panels[len(of_policy) :]:
            axes.set_axis_off()
        image = None
        for axes, ((policy,), mine) in zip(panels, of_policy.items(), strict=False):
            cells = grouped((c for r in mine for c in r["result"]["cells"]), "length", "depth")
            lengths = sorted(unique(length for length, _ in cells))
            depths = sorted(unique(depth for _, depth in cells))
            found = [
                [_share(cells.get((length, depth), [])) for length in lengths] for depth in depths
            ]
            image = axes.imshow(found, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
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
    """Mean accuracy; where nothing was asked NaN, which is drawn as a hole."""
    return float(mean(cell["accuracy"] for cell in cells)) if cells else math.nan


@contextmanager
def _drawing(salt: str, height: float) -> Iterator[tuple[Figure, list[str]]]:
    """A figure to draw into; what follows it in the list, afterwards, is its SVG element."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # The salt keeps the names inside the pictures of a page apart, and the same from run to run.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10}):
        figure = Figure(figsize=(7.6, height), layout="constrained")
        out: list[str] = []
        yield figure, out
        target = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(target, format="svg", metadata=nothing)
    svg = target.getvalue()
    out.append(re.sub(r' id="[a-z0-9.]+_\d+"', "", svg[svg.index("<svg") :]))


def _look(number: int) -> dict[str, Any]:
    """A colour and a marker that no other of twenty lines has."""
    import matplotlib as mpl

    # Strong colours first, then their pale twins.
    colour = mpl.colormaps["tab20"]((2 * number) % 20 + (number // 10) % 2)
    return {"color": colour, "marker": MARKERS[number % len(MARKERS)]}


def _scales(axes: Axes, across: Sequence[float], up: Sequence[float]) -> None:
    if _is_far(across, FAR_BYTES):
        axes.set_xscale("log")
    if _is_far(up, FAR):
        axes.set_yscale("log")


def _is_far(values: Sequence[float], far: float) -> bool:
    return bool(values) and min(values) > 0 and max(values) > far * min(values)


def _dress(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            axis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.grid(color="#e3e7ea", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.legend(loc="outside right upper", frameon=False, fontsize=8)
