"""A picture of attention errors: error against rate, a panel for each layer, a line a policy."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from weir.errors import WeirError
from weir.evals.attention_error.attention_error import LayerError
from weir.evals.look import look

KINDS = (".svg", ".png", ".pdf")
ACROSS = 4
"""Panels side by side."""


def check_plot(path: Path) -> None:
    """Refuse a file that no plot can be written to, before anything is measured.

    Raises:
        WeirError: its name or its folder will not do.
    """
    if path.suffix.lower() not in KINDS:
        raise WeirError(f"a plot is written as {', '.join(KINDS)}, not as {path}")
    if not path.expanduser().parent.is_dir():
        raise WeirError(f"there is no folder {path.parent} to write the plot to")


def write_plot(rows: Sequence[LayerError], path: Path) -> None:
    """Draw the errors, with bars of one standard deviation, as BalanceKV's Figure 1.

    Without rates there is one point for each policy.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    layers = sorted({row.layer for row in rows})
    names = list(dict.fromkeys(row.name for row in rows))
    across = min(ACROSS, len(layers))
    down = -(-len(layers) // across)
    salt = "attention-error"
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 9}):
        figure = Figure(figsize=(2.6 * across + 0.6, 2.4 * down + 0.8), layout="constrained")
        panels = figure.subplots(down, across, sharey=True, squeeze=False).flatten()
        for axes, layer in zip(panels, layers, strict=False):
            for number, name in enumerate(names):
                mine = [row for row in rows if row.layer == layer and row.name == name]
                places = [names.index(name) if row.rate is None else row.rate for row in mine]
                axes.errorbar(
                    places,
                    [row.error for row in mine],
                    yerr=[row.deviation for row in mine],
                    ms=4,
                    **look(number),
                    lw=1.5,
                    capsize=2,
                    label=name,
                )
            axes.set_title(f"layer {layer}", fontsize=9)
            rates = sorted({row.rate for row in rows if row.rate is not None})
            if rates:
                axes.set_xscale("log", base=2)
                labels = [str(Fraction(rate).limit_denominator(1000)) for rate in rates]
                axes.set_xticks(rates, labels)
                axes.set_xlabel("rate")
            else:
                axes.set_xticks([])
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in panels[len(layers) :]:
            axes.set_visible(False)
        panels[0].set_ylabel("relative error")
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=min(6, len(names)),
            frameon=False,
        )
        # Without a date the same figures make the same file.
        dateless = {"Date": None} if path.suffix.lower() == ".svg" else None
        try:
            figure.savefig(path.expanduser(), metadata=dateless)
        except OSError as error:
            raise WeirError(f"cannot write {path}: {error.strerror or error}") from None
