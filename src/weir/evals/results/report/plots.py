"""Pictures of results, as SVG elements: quality against bytes, perplexity by place, heat maps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from weir.evals.look import GRAY, drawing, dress, is_far, look
from weir.evals.results.file import CellRecord, unique
from weir.evals.results.summary import grouped, without_budget

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 7.6
"""Inches."""
FAR = 20.0
"""From such a ratio of the largest figure to the smallest on, a scale is logarithmic."""
FAR_BYTES = 10.0
"""The same of bytes: policies of some hundred slots and exact attention are farther apart."""


def family(policy: str) -> str:
    """What policies of different budgets have in common: all but the budget; a pipe itself.

    Of a policy that was written without the word `budget` it is the name.
    """
    plain = without_budget(policy)
    return plain if plain != policy or " | " in policy else policy.partition("(")[0]


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
    """Every policy's figure against the bytes of its cache, budgets joined; the front in gray.

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
    with drawing(f"pareto{label}", WIDTH, _height(names)) as (figure, out):
        axes = figure.subplots()
        higher = records[0]["better"] == "higher"
        best = [points[names[i]] for i in front(list(points.values()), higher)]
        axes.plot(
            *zip(*best, strict=True),
            color=GRAY,
            lw=5,
            alpha=0.25,
            zorder=1,
            label="not beaten in both",
        )
        for number, kind in enumerate(unique(family(name) for name in names)):
            mine = sorted(points[name] for name in names if family(name) == kind)
            axes.plot(*zip(*mine, strict=True), lw=1.2, ms=6, label=kind, **look(number))
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
    with drawing("along", WIDTH, _height([p for (p,) in of_policy])) as (figure, out):
        axes = figure.subplots()
        every = []
        for number, ((policy,), mine) in enumerate(of_policy.items()):
            result = mine[0]["result"]
            values = result["ppl_by_block"]
            edges = [min(i * result["block"], result["tokens"]) for i in range(len(values) + 1)]
            middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
            how = look(number)
            if len(values) > 25:  # so many markers would be one smear
                how["markevery"] = max(1, len(values) // 8)
            axes.plot(middles, values, lw=1.4, ms=4, label=policy, **how)
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
    with drawing("heat", WIDTH, 1.9 * down + 0.6) as (figure, out):
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
    """Mean accuracy; where nothing was asked NaN, which is drawn as a hole."""
    return float(mean(cell["accuracy"] for cell in cells)) if cells else math.nan


def _height(names: Sequence[str]) -> float:
    """Inches of a picture that has three names of lines in each row below it."""
    return 3.4 + 0.17 * -(-len(names) // 3)


def _scales(axes: Axes, across: Sequence[float], up: Sequence[float]) -> None:
    if is_far(across, FAR_BYTES):
        axes.set_xscale("log")
    if is_far(up, FAR):
        axes.set_yscale("log")


def _dress(axes: Axes) -> None:
    """Grid, numbers, and the legend below all of it, where it hides no point."""
    dress(axes)
    axes.figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=3)
