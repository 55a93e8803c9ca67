"""The demo's report: one HTML page with its plots inside, to be opened without a network."""

from __future__ import annotations

import html
import io
import itertools
import re
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#c0392b", "#d68910", "#1f77b4", "#148f77", "#7d3c98", "#5d6d7e")
DASHES = ("-", "-", (0, (5, 3)), (0, (2, 2)), (0, (7, 2)), (0, (1, 3)))
"""Beside the colours, so that of lines on top of each other all are seen."""
GREY = "#77828c"


def write_report(result: dict[str, Any], path: Path) -> None:
    """Write the page for what `demo.run` returned."""
    from weir import __version__

    page = Template((resources.files("weir.evals.demo") / "report.html").read_text("utf-8"))
    policies = result["policies"]
    steady = [policy for policy in policies if policy["slots"] is not None] or policies
    rows = (_row(policy, _of(COLOURS, result, policy)) for policy in policies)
    text = page.substitute(
        version=__version__,
        book=html.escape(result["book"]),
        tokens=f"{result['tokens']:,}",
        times=f"{result['tokens'] / result['model_window']:.1f}",
        window=f"{result['model_window']:,}",
        block=f"{result['block']:,}",
        rows="\n".join(rows),
        all_perplexity=_plot(result, policies, "ppl_by_block", "perplexity", log=True),
        perplexity=_plot(result, steady, "ppl_by_block", "perplexity"),
        memory=_plot(result, policies, "bytes_by_block", "cache, MB", log=True),
    )
    path.write_text(text, "utf-8")


def _of(looks: tuple[Any, ...], result: dict[str, Any], policy: dict[str, Any]) -> Any:
    """Which of some looks is the policy's, in all plots."""
    return looks[result["policies"].index(policy) % len(looks)]


def _row(policy: dict[str, Any], colour: str) -> str:
    cells = (
        f"{policy['ppl']:,.1f}",
        f"{policy['ppl_by_block'][-1]:,.1f}",
        f"{policy['kv_bytes'] / 1e6:,.1f} MB",
        f"{policy['tokens_per_s']:,.0f}",
    )
    written = html.escape(policy["policy"]).replace("(", "<wbr>(")  # a phone may break it there
    name = f'<i style="background:{colour}"></i><code>{written}</code>'
    return f"<tr><td>{name}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _plot(
    result: dict[str, Any],
    policies: list[dict[str, Any]],
    key: str,
    label: str,
    *,
    log: bool = False,
) -> str:
    """One line per policy over the position in the book, as an SVG element."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # The salt keeps the names inside the page's pictures apart, and the same from run to run.
    salt = f"{key}{log}{len(policies)}"
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 10}):
        # As narrow as a phone can show with letters that can be read.
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes = figure.subplots()
        for policy in policies:
            look = {"color": _of(COLOURS, result, policy), "lw": 2, "label": policy["policy"]}
            look["ls"] = _of(DASHES, result, policy)
            edges = _edges(result, policy[key])
            if key == "bytes_by_block":
                held = [n / 1e6 for n in policy[key]]
                axes.plot(edges, [held[0], *held], drawstyle="steps-pre", **look)
            else:
                middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
                axes.plot(middles, policy[key], marker="o", ms=2.5, **look)
        _dress(axes, result, label, log)
        figure.legend(loc="outside lower center", frameon=False, fontsize=9, ncols=2)
        target = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(target, format="svg", transparent=True, metadata=nothing)
    svg = target.getvalue()
    return re.sub(r' id="[a-z0-9.]+_\d+"', "", svg[svg.index("<svg") :])


def _edges(result: dict[str, Any], values: list[Any]) -> list[int]:
    """Where the blocks begin, and where the last one ends."""
    return [min(n * result["block"], result["tokens"]) for n in range(len(values) + 1)]


def _dress(axes: Axes, result: dict[str, Any], label: str, log: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:,g}")
    axes.set_xlim(0, result["tokens"])
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(plain)
    axes.set_xlabel("tokens read")
    axes.set_ylabel(label)
    if log:
        axes.set_yscale("log")
        axes.margins(y=0.1)  # so that the lowest line does not lie on the axis
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(plain)
    axes.grid(axis="y", color="#e3e7ea", lw=0.8)
    window = result["model_window"]
    if window < result["tokens"]:
        axes.axvline(window, color=GREY, lw=1, ls=":")
        top = axes.get_xaxis_transform()
        axes.text(window, 1.01, "the model's window", color=GREY, transform=top)
    axes.spines[["top", "right"]].set_visible(False)
