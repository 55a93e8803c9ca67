"""The experiment's two pictures: perplexity by configuration, and loss curves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weir.evals.look import look
from weir.evals.sinks import paper
from weir.train import read_log, smoothed

WIDTH = 5.2
"""Inches; readable on a phone."""


def plot_perplexity(result: dict[str, Any], out: Path) -> None:
    """Perplexity by the number of initial tokens that are kept, here and in the paper."""
    from matplotlib.figure import Figure

    models = result["models"]
    here = {sink: [model["ppl"][str(x)] for x in paper.CONFIGS] for sink, model in models.items()}
    theirs = {sink: paper.PERPLEXITY[sink] for sink in models if sink in paper.PERPLEXITY}
    panels = [("here", here)] + ([("paper, 160 million parameters", theirs)] if theirs else [])
    figure = Figure(figsize=(WIDTH, 1.0 + 2.4 * len(panels)), layout="constrained")
    places = range(len(paper.CONFIGS))
    for axes, (title, lines) in zip(
        figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0], panels, strict=True
    ):
        for number, (sink, ppl) in enumerate(lines.items()):
            name = paper.VARIANTS.get(sink, sink)
            axes.plot(places, ppl, label=name, linewidth=1.4, markersize=5, **look(number))
        values = [ppl for line in lines.values() for ppl in line]
        low, high = min(values), max(values)
        if high < 3 * low:
            # Differences of a few per cent are to look like that.
            axes.set_ylim(low / 1.1, high * 1.1)
        else:
            axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
        axes.set_ylabel("streaming perplexity")
        axes.grid(alpha=0.3)
    axes.set_xticks(places, [str(x) for x in paper.CONFIGS])
    axes.set_xlabel("initial tokens in the cache, all others recent")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=2,
        frameon=False,
    )
    figure.savefig(out, dpi=130)


def plot_losses(logs: Mapping[str, Path], out: Path) -> None:
    """Loss curves above, and below how far each is from the first one's, step by step.

    The steps have the same samples, so that the difference shows what the curves hide.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    base: np.ndarray | None = None
    top = 0.0
    for number, (name, path) in enumerate(logs.items()):
        rows = read_log(path)
        tokens = np.array([row["tokens"] for row in rows]) / 1e6
        losses = np.array([row["loss"] for row in rows])
        color = look(number)["color"]
        [line] = above.plot(tokens, smoothed(losses), label=name, linewidth=1.3, color=color)
        top = max(top, smoothed(losses)[len(losses) // 20])
        base = losses if base is None else base
        shared = min(len(base), len(losses))
        apart = smoothed(losses[:shared] - base[:shared], 0.05)
        below.plot(tokens[:shared], apart, color=line.get_color(), linewidth=1.3)
    above.set_ylim(top=top)
    above.set_ylabel("loss (nats per token)")
    above.legend()
    below.set_ylabel(f"loss less {next(iter(logs))}'s")
    below.set_xlabel("tokens of text trained on (millions)")
    late = [line.get_ydata()[len(line.get_ydata()) // 10 :] for line in below.get_lines()]
    reach = max((float(np.abs(values).max()) for values in late if len(values)), default=0.0)
    if reach > 0:
        below.set_ylim(-1.1 * reach, 1.1 * reach)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(out, dpi=130)
