"""The geometry of keys and values: t-SNE with greedy centers, and clusterability.

SubGen (Zandieh et al. 2024), section 3.1 and Figure 1: the keys of a Llama-2-7B are said to be more
clusterable than its values, thanks to rotary embedding. So keys are measured as transformers caches
them, rotated to their places, and again as if all were at place 0. By SubGen's Definition 1, points
are clusterable if few balls of a small radius cover them. A radius grows with the points' scale,
number and dimension, so it is compared with a control: every coordinate is shuffled independently.
This keeps the distribution of each coordinate, but removes the dependence between coordinates,
without which there are no clusters.

The first token, or all tokens of a learned sink, are left out. The sink is far from all other
tokens. Its shuffled coordinates would spread the control, and make any set of points look
clusterable.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weir import kernels
from weir.errors import WeirError
from weir.evals.capture import LayerInputs, capture_each, in_place, unrotated_keys
from weir.evals.inspect.section import (
    Inspection,
    Picture,
    Section,
    drawing,
    longest,
    passages,
    style_panel,
)
from weir.evals.records import import_optional
from weir.evals.report import TextTable
from weir.evals.scores import mean_interval
from weir.models import describe
from weir.pools import farthest_first

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEYS, TURNED, VALUES = "keys", "keys at place 0", "values"
LOOKS = {
    KEYS: ("#2c6e9b", "o", "-"),
    TURNED: ("#7a9a01", "^", "--"),
    VALUES: ("#c0392b", "s", ":"),
}
"""Color, marker and line of each kind, which can be distinguished without colors."""
GRAY = "#77828c"
FEWEST = 8
"""Smallest number of points, for which there are three numbers of centers."""
USUAL = 1024
"""Tokens of a passage, as in the paper; as many as the model's window holds if those are fewer."""
TEXTS = 5
"""Largest number of passages."""
LAYERS = 5
"""Layers of a deep model that are shown by default, evenly spread, as in the paper."""
CENTERS = 16
"""Number of centers in the paper's figure."""
PERPLEXITY = 30.0
"""The perplexity of t-SNE, its usual value; for few tokens, about a third of their number."""
MOST_ROWS = 40
"""Largest number of heads that have a table row each; if there are more, each layer has a row."""


@dataclass(frozen=True)
class Covering:
    """Covering radii [sets, counts] of points and of their controls, in units of the spread.

    `counts` are numbers of centers, k.
    """

    counts: tuple[int, ...]
    radius: Tensor
    control: Tensor

    @property
    def score(self) -> Tensor:
        """The clusterability [sets]: the share by which a set's radii are smaller than the
        control's.

        It is the mean over all k except 1, which does not measure clusters. 0 means no more
        clustered than independent coordinates, and 1 means that there are at most as many different
        points as centers.
        """
        several = [n for n, k in enumerate(self.counts) if k > 1]
        mine, other = self.radius[:, several], self.control[:, several]
        # If the control's radius is also zero, there is nothing to compare.
        ratio = torch.where(other > 0, mine / other, torch.ones_like(mine))
        return (1 - ratio).mean(dim=1)


def doublings(points: int) -> tuple[int, ...]:
    """Return the numbers of centers for `points` points: 1, 2, 4, ... up to half of them."""
    if points < FEWEST:
        raise WeirError(
            f"{points} tokens are too few to look for clusters. Use a text of at least {FEWEST} "
            "tokens."
        )
    return tuple(2**n for n in range((points // 2).bit_length()))


def cover(points: Tensor, seed: int = 0) -> Covering:
    """Compute the covering radii of sets of points [sets, n, dim], and of their shuffled
    controls.
    """
    points = points.float()
    counts = doublings(points.shape[1])
    # Shuffling does not change the spread, so both have the same unit.
    unit = spread(points)[:, None]
    unit = torch.where(unit > 0, unit, torch.ones_like(unit))
    other = shuffle_coordinates(points, seed)
    return Covering(counts, *(covering_radii(each, counts) / unit for each in (points, other)))


def spread(points: Tensor) -> Tensor:
    """Root mean square distance [sets] of points [sets, n, dim] from their mean."""
    return (points - points.mean(dim=1, keepdim=True)).square().sum(dim=2).mean(dim=1).sqrt()


def shuffle_coordinates(points: Tensor, seed: int) -> Tensor:
    """Shuffle every coordinate of every set independently [sets, n, dim]."""
    draws = torch.rand(points.shape, generator=torch.Generator().manual_seed(seed % 2**63))
    return points.gather(1, draws.argsort(dim=1).to(points.device))


def centers(points: Tensor, k: int) -> Tensor:
    """Return which k of the points [sets, n, dim] the pool `kcenter` would pick, starting with the
    first, as a mask [sets, n].
    """
    if not 1 <= k <= points.shape[1]:
        raise WeirError(f"{k} centers cannot be picked from {points.shape[1]} tokens")
    pick = kernels.farthest_first(points.device) or farthest_first
    among = torch.ones(1, *points.shape[:2], dtype=torch.bool, device=points.device)
    return pick(points[None], among, k)[0] >= 0


def covering_radii(points: Tensor, counts: Sequence[int]) -> Tensor:
    """The largest distance of points [sets, n, dim] from their nearest center [sets, counts]."""
    found = []
    for k in counts:
        for mine, picked in zip(points, centers(points, k), strict=True):
            # Compute distances from differences, so that a center's distance from itself is exactly
            # zero.
            far = torch.cdist(mine, mine[picked], compute_mode="donot_use_mm_for_euclid_dist")
            found.append(float(far.amin(dim=1).max()))
    return torch.tensor(found).view(len(counts), -1).T.contiguous()


class Vectors(NamedTuple):
    """Keys or values of one KV head over one passage, without the sink [tokens - sink, dim]."""

    layer: int
    head: int
    kind: str
    points: Tensor


def section(asked: Inspection) -> Section:
    """Clusterability of keys and values of chosen layers and heads, as pictures and numbers."""
    _manifold()  # fail before anything is read
    texts = passages(asked, longest(asked, USUAL), TEXTS, FEWEST + left_out(asked))
    layers = chosen_layers(asked)
    measured, vectors = measure(asked, texts, layers)
    planes = []
    for one in vectors:
        planes.append(plane_of(one.points, asked.seed))
        asked.on_step(len(texts) * len(layers) + len(planes), _steps(texts, layers))
    shown = ", ".join(map(str, some_of(layers)))
    plane = f"Keys and values of one head of layers {shown} in a plane, greedy centers marked."
    covering = "Covering radius, as a share of a shuffled control's, by the number of centers."
    scores = "Clusterability of keys and values of every KV head, by layer."
    pictures = (
        Picture("keys-plane", draw_planes(vectors, planes, left_out(asked)), plane),
        Picture("keys-covering", draw_curves(measured), covering),
        Picture("keys-scores", draw_scores(measured), scores),
    )
    means = {kind: _mean(_of(measured, kind=kind)) for kind in _kinds(measured)}
    facts = {
        "passages": texts.shape[0],
        "tokens": texts.shape[1],
        "mean": {kind: {"score": mean, "reach": reach} for kind, (mean, reach) in means.items()},
        "heads": measured,
    }
    title = "Are keys more clusterable than values?"
    return Section("keys", title, _text(texts, measured), pictures, _table(measured), facts)


def chosen_layers(asked: Inspection) -> tuple[int, ...]:
    """The chosen layers; by default a few from the first to the last."""
    return asked.layers or some_of(range(len(describe(asked.model).layers)))


def left_out(asked: Inspection) -> int:
    """The number of tokens that are left out: those of a learned sink, or the first."""
    return max(1, len(asked.sink.tokens))


def some_of(layers: Sequence[int]) -> tuple[int, ...]:
    """Pick a few layers, evenly from the first to the last."""
    few = min(len(layers), LAYERS)
    return tuple(layers[round(n * (len(layers) - 1) / max(1, few - 1))] for n in range(few))


def measure(
    asked: Inspection, texts: Tensor, layers: Sequence[int]
) -> tuple[list[dict[str, Any]], list[Vectors]]:
    """Measure the coverings of every head over passages [passages, length], layer by layer.

    Returns:
        For each layer, KV head and kind: the mean "score", the half-width of its interval
        ("reach"), "scores" by passage, "k" (numbers of centers), "radius" and "control" by passage
        and k. And vectors to draw: keys and values of the first passage, in a few layers, of one
        head of each layer. This is the first of the chosen heads or, if none are chosen, a random
        one, as in the paper.
    """
    found: dict[tuple[int, int, str], dict[str, Any]] = {}
    kept: list[Vectors] = []
    sink = left_out(asked)
    lot, drawn, done = random.Random(asked.seed), some_of(layers), 0

    def take(number: int, one: LayerInputs) -> None:
        nonlocal done
        chosen = asked.kv_heads(one.queries.shape[1] // one.keys.shape[1])
        heads = list(range(one.keys.shape[1]) if chosen is None else chosen)
        head = lot.choice(heads) if chosen is None else heads[0]
        for kind, x in kinds_of(one).items():
            points = x[0, heads, sink:]
            covering = cover(points, asked.seed + 1000 * number + one.layer)
            parts = covering.score, covering.radius, covering.control
            for kv_head, score, radius, control in zip(heads, *parts, strict=True):
                name = {"layer": one.layer, "head": kv_head, "kind": kind}
                lists = {"scores": [], "k": list(covering.counts), "radius": [], "control": []}
                new = {**name, "score": 0.0, "reach": None, **lists}
                mine = found.setdefault((one.layer, kv_head, kind), new)
                mine["scores"].append(float(score))
                mine["radius"].append(radius.tolist())
                mine["control"].append(control.tolist())
            if number == 0 and kind != TURNED and one.layer in drawn:
                kept.append(Vectors(one.layer, head, kind, x[0, head, sink:].clone()))
        done += 1
        asked.on_step(done, _steps(texts, layers))

    for number, ids in enumerate(texts):
        capture_each(asked.model, ids, partial(take, number), layers)
    for mine in found.values():
        mine["score"], mine["reach"] = mean_interval(mine["scores"])
    return list(found.values()), kept


def kinds_of(one: LayerInputs) -> dict[str, Tensor]:
    """Keys, keys at place 0 if a layer rotates them, and values [1, kv_heads, length, dim]."""
    found = {KEYS: in_place(one, one.keys), TURNED: unrotated_keys(one), VALUES: one.values}
    return {kind: x for kind, x in found.items() if x is not None}


def plane_of(points: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Places [tokens, 2] of points [tokens, dim] by t-SNE, and which are centers [tokens]."""
    count = len(points)
    # If all vectors are equal, principal components have zero length and cannot be scaled.
    start = "pca" if bool((points != points[:1]).any()) else "random"
    tsne = _manifold().TSNE(
        perplexity=min(PERPLEXITY, (count - 1) / 3), init=start, random_state=seed % 2**32
    )
    place = torch.from_numpy(tsne.fit_transform(points.cpu().numpy()))
    return place, centers(points[None], min(CENTERS, count // 2))[0].cpu()


def _manifold() -> Any:
    return import_optional("sklearn.manifold", "a picture of keys in a plane", "inspect")


def _steps(texts: Tensor, layers: Sequence[int]) -> int:
    """Count progress steps: one per layer of a passage, and one per t-SNE projection."""
    return len(texts) * len(layers) + 2 * len(some_of(layers))


def draw_planes(
    vectors: Sequence[Vectors], planes: Sequence[tuple[Tensor, Tensor]], first: int = 0
) -> Figure:
    """Draw a row per layer, with a column for keys and one for values; centers have rings."""
    kinds = list(dict.fromkeys(one.kind for one in vectors))
    layers = list(dict.fromkeys(one.layer for one in vectors))
    with drawing(2.4 * len(layers) + 0.7) as figure:
        panels = figure.subplots(len(layers), len(kinds), squeeze=False)
        for one, (place, center) in zip(vectors, planes, strict=True):
            axes = panels[layers.index(one.layer), kinds.index(one.kind)]
            order = range(first, first + len(place))
            dots = axes.scatter(*place.T.numpy(), c=order, cmap="viridis", s=5, lw=0)
            x, y = place[center].T.numpy()
            axes.scatter(x, y, s=34, facecolors="none", edgecolors="#d1410c", lw=1.3)
            axes.set_title(f"{one.kind}, layer {one.layer}, head {one.head}", fontsize=8.5, pad=3)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_color("#c8d0d6")
        rings = f"rings: {int(planes[0][1].sum())} greedy centers"
        figure.supxlabel(f"t-SNE, first coordinate (no unit); {rings}", size=9)
        figure.supylabel("t-SNE, second coordinate (no unit)", size=9)
        look: dict[str, Any] = {"location": "top", "aspect": 45, "shrink": 0.9, "pad": 0.02}
        figure.colorbar(dots, ax=panels, label="place in the text, tokens", **look)
    return figure


def draw_curves(measured: Sequence[dict[str, Any]]) -> Figure:
    """Draw covering radii by k, as shares of the control's; bands are intervals over passages."""
    with drawing(3.1) as figure:
        axes = figure.subplots()
        axes.axhline(1, color=GRAY, lw=1)
        end = axes.get_yaxis_transform()
        axes.text(0.99, 1, "the control", color=GRAY, ha="right", va="bottom", transform=end)
        counts = measured[0]["k"]
        for kind in _kinds(measured):
            color, marker, line = LOOKS[kind]
            mine = _of(measured, kind=kind)
            radius, control = (
                torch.tensor([one[x] for one in mine]) for x in ("radius", "control")
            )
            # By passage and k, the mean over heads.
            shares = torch.where(control > 0, radius / control, 1.0).mean(dim=0)
            middle, reach = zip(*map(mean_interval, shares.T.tolist()), strict=True)
            axes.plot(counts, middle, line, marker=marker, color=color, ms=4, lw=1.6, label=kind)
            if reach[0] is not None:
                ends = np.add(middle, np.outer((-1, 1), reach))
                axes.fill_between(counts, *ends, color=color, alpha=0.18, lw=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(k) for k in counts])
        axes.minorticks_off()
        axes.set(xlabel="greedy centers k", ylabel="covering radius / that of the control")
        _dress_axes(axes)
    return figure


def draw_scores(measured: Sequence[dict[str, Any]]) -> Figure:
    """Draw the clusterability of every head by layer; a line joins the means of the layers."""
    layers = list(dict.fromkeys(one["layer"] for one in measured))
    with drawing(3.1) as figure:
        axes = figure.subplots()
        axes.axhline(0, color=GRAY, lw=1)
        kinds = _kinds(measured)
        for number, kind in enumerate(kinds):
            color, marker, line = LOOKS[kind]
            aside = 0.16 * (number - (len(kinds) - 1) / 2)
            mine = _of(measured, kind=kind)
            x = [layers.index(one["layer"]) + aside for one in mine]
            y = [one["score"] for one in mine]
            if mine[0]["reach"] is not None:
                reach = [one["reach"] for one in mine]
                axes.errorbar(x, y, reach, fmt="none", ecolor=color, elinewidth=0.8, alpha=0.5)
            axes.plot(x, y, marker, color=color, ms=4)
            means = {
                place: fmean(score for at, score in zip(x, y, strict=True) if at == place)
                for place in dict.fromkeys(x)
            }
            axes.plot(list(means), list(means.values()), line, color=color, lw=1.2)
            axes.plot([], [], line, marker=marker, color=color, ms=4, lw=1.2, label=kind)
        axes.set_xticks(range(len(layers)), [str(layer) for layer in layers])
        axes.margins(x=0.08)
        axes.set(xlabel="layer", ylabel="clusterability (no unit)")
        _dress_axes(axes)
    return figure


def _dress_axes(axes: Axes) -> None:
    style_panel(axes)
    axes.figure.legend(loc="outside upper center", frameon=False, ncols=3)


def _mean(measured: Sequence[dict[str, Any]]) -> tuple[float, float | None]:
    """The mean score of some heads, and its interval over passages."""
    return mean_interval(
        [fmean(scores) for scores in zip(*(one["scores"] for one in measured), strict=True)]
    )


def _cell(measured: Sequence[dict[str, Any]]) -> str:
    if not measured:
        return "—"
    mean, reach = _mean(measured)
    return f"{mean:.2f}" if reach is None else f"{mean:.2f} ± {reach:.2f}"


def _of(measured: Sequence[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the entries that have the wanted values."""
    return [one for one in measured if all(one[k] == v for k, v in wanted.items())]


def _kinds(measured: Sequence[dict[str, Any]]) -> list[str]:
    return [kind for kind in LOOKS if _of(measured, kind=kind)]


def _text(texts: Tensor, measured: Sequence[dict[str, Any]]) -> str:
    figures = ", ".join(f"{kind} {_cell(_of(measured, kind=kind))}" for kind in _kinds(measured))
    count, length = texts.shape
    over = f"{count} passages of {length:,} tokens" if count > 1 else f"{length:,} tokens"
    turned = f', rotated to their places; "{TURNED}" are rotated back to place 0'
    turned = turned if TURNED in _kinds(measured) else ""
    sure = ", 95 % intervals over the passages" if count > 1 else ""
    return (
        "SubGen's Figure 1 shows keys that fall into clusters, and values that do not, by t-SNE "
        f"with {CENTERS} greedy centers. A plane can mislead, so clusterability is "
        "also given as a number. k greedy centers cover all vectors within some radius. "
        "Clusterability is the share by which this radius is smaller than that of a control, in "
        "which the same coordinates are shuffled over the tokens. It is the mean over k = 2, 4, 8, "
        "... up to half of the tokens. 0 means no more structure than in the control, and 1 means "
        f"that there are no more different vectors than centers. Over {over}, the mean over heads "
        f"is: {figures}{sure}. Keys are as a cache holds them{turned}. The first token, which is "
        "the sink of most models, is left out, and so are all tokens of a learned sink."
    )


def _table(measured: Sequence[dict[str, Any]]) -> TextTable:
    by = ["layer", "head"]
    if len({(one["layer"], one["head"]) for one in measured}) > MOST_ROWS:
        by = ["layer"]
    groups = {", ".join(f"{x} {one[x]}" for x in by): {x: one[x] for x in by} for one in measured}
    kinds = _kinds(measured)
    rows = [
        (name, *(_cell(_of(measured, kind=kind, **which)) for kind in kinds))
        for name, which in [*groups.items(), ("all", {})]
    ]
    return TextTable(("KV head", *kinds), tuple(rows))
