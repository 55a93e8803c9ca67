"""Pictures of keys and values: in a plane, their covering radii, and a number for every head.

Knows nothing about how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weir.evals.inspect.section import drawing
from weir.evals.measures import around_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = (("#2c6e9b", "o", "-"), ("#7a9a01", "^", "--"), ("#c0392b", "s", ":"))
"""Color, marker and line of each kind: told apart without colors too."""
GRAY = "#77828c"


@dataclass(frozen=True)
class Measured:
    """The coverings of one KV head's keys or values, passage by passage.

    Attributes:
        layer, head: which; the head is a KV head.
        kind: what of it.
        counts: how many centers, k.
        radius: by passage and count, in units of the spread.
        control: the same of the shuffled control.
        scores: clusterability by passage.
    """

    layer: int
    head: int
    kind: str
    counts: tuple[int, ...]
    radius: list[list[float]] = field(default_factory=list)
    control: list[list[float]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Cloud:
    """Keys or values of one KV head over one passage, in a plane.

    Attributes:
        layer, head, kind: which.
        place: of the points, in the order of the text [tokens, 2].
        center: which of them greedy k-center picked [tokens], bool.
    """

    layer: int
    head: int
    kind: str
    place: Tensor
    center: Tensor


def draw_clouds(clouds: Sequence[Cloud], first: int = 0) -> Figure:
    """A row for each layer, a column for keys and one for values; centers have rings.

    Args:
        clouds: in the order of their places.
        first: the place in the text of their first points.
    """
    kinds = list(dict.fromkeys(it.kind for it in clouds))
    layers = list(dict.fromkeys(it.layer for it in clouds))
    with drawing(2.4 * len(layers) + 0.7) as figure:
        panels = figure.subplots(len(layers), len(kinds), squeeze=False)
        for it in clouds:
            axes = panels[layers.index(it.layer), kinds.index(it.kind)]
            order = range(first, first + len(it.place))
            x, y = it.place.T.numpy()
            dots = axes.scatter(x, y, c=order, cmap="viridis", s=5, lw=0)
            x, y = it.place[it.center].T.numpy()
            axes.scatter(x, y, s=34, facecolors="none", edgecolors="#d1410c", lw=1.3)
            axes.set_title(f"{it.kind}, layer {it.layer}, head {it.head}", fontsize=8.5, pad=3)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_color("#c8d0d6")
        many = int(clouds[0].center.sum())
        figure.supxlabel(f"t-SNE, first coordinate (no unit); rings: {many} greedy centers", size=9)
        figure.supylabel("t-SNE, second coordinate (no unit)", size=9)
        bar = figure.colorbar(dots, ax=panels, location="top", aspect=45, shrink=0.9, pad=0.02)
        bar.set_label("place in the text, tokens")
    return figure


def draw_curves(measured: Sequence[Measured]) -> Figure:
    """Covering radii by k, as shares of the control's; bands are intervals over passages."""
    with drawing(3.1) as figure:
        axes = figure.subplots()
        axes.axhline(1, color=GRAY, lw=1)
        end = axes.get_yaxis_transform()
        axes.text(0.99, 1, "the control", color=GRAY, ha="right", va="bottom", transform=end)
        for kind, (color, marker, line) in _looks(measured):
            mine = [it for it in measured if it.kind == kind]
            counts = list(mine[0].counts)
            points = [around_mean(shares) for shares in zip(*_shares(mine), strict=True)]
            middle = [mean for mean, _ in points]
            axes.plot(counts, middle, line, marker=marker, color=color, ms=4, lw=1.6, label=kind)
            if points[0][1] is not None:
                low = [mean - (reach or 0.0) for mean, reach in points]
                high = [mean + (reach or 0.0) for mean, reach in points]
                axes.fill_between(counts, low, high, color=color, alpha=0.18, lw=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(k) for k in counts])
        axes.minorticks_off()
        axes.set_xlabel("greedy centers k")
        axes.set_ylabel("covering radius / that of the control")
        _dress(axes)
    return figure


def draw_scores(measured: Sequence[Measured]) -> Figure:
    """The clusterability of every head by layer; a line joins the means of the layers."""
    layers = list(dict.fromkeys(it.layer for it in measured))
    with drawing(3.1) as figure:
        axes = figure.subplots()
        axes.axhline(0, color=GRAY, lw=1)
        looks = _looks(measured)
        for number, (kind, (color, marker, line)) in enumerate(looks):
            aside = 0.16 * (number - (len(looks) - 1) / 2)
            mine = [it for it in measured if it.kind == kind]
            x = [layers.index(it.layer) + aside for it in mine]
            scores = [around_mean(it.scores) for it in mine]
            y = [mean for mean, _ in scores]
            if scores[0][1] is not None:
                reach = [reach or 0.0 for _, reach in scores]
                axes.errorbar(x, y, reach, fmt="none", ecolor=color, elinewidth=0.8, alpha=0.5)
            axes.plot(x, y, marker, color=color, ms=4)
            of = [layer for layer in layers if any(it.layer == layer for it in mine)]
            means = [fmean(s for it, s in zip(mine, y, strict=True) if it.layer == n) for n in of]
            places = [layers.index(layer) + aside for layer in of]
            axes.plot(places, means, line, color=color, lw=1.2)
            axes.plot([], [], line, marker=marker, color=color, ms=4, lw=1.2, label=kind)
        axes.set_xticks(range(len(layers)), [str(layer) for layer in layers])
        axes.margins(x=0.08)
        axes.set_xlabel("layer")
        axes.set_ylabel("clusterability (no unit)")
        _dress(axes)
    return figure


def _looks(measured: Sequence[Measured]) -> list[tuple[str, tuple[str, str, str]]]:
    """The kinds that were measured, each with its look."""
    kinds = ("keys", "keys at place 0", "values")
    there = {it.kind for it in measured}
    return [pair for pair in zip(kinds, LOOKS, strict=True) if pair[0] in there]


def _shares(measured: Sequence[Measured]) -> list[list[float]]:
    """By passage and k: radius / control's, the mean over heads."""
    radius, control = (
        torch.tensor([getattr(it, name) for it in measured]) for name in ("radius", "control")
    )
    share = torch.where(control > 0, radius / control, torch.ones_like(radius))
    found: list[list[float]] = share.mean(dim=0).tolist()
    return found


def _dress(axes: Axes) -> None:
    axes.grid(axis="y", color="#e3e7ea", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.figure.legend(loc="outside upper center", frameon=False, ncols=3)
