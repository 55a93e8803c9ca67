"""The demo's report: one HTML page with its plots inside, to be opened without a network."""

from __future__ import annotations

import html
import io
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

COLOURS = ("#c0392b", "#d68910", "#1f77b4", "#148f77", "#7d3c98", "#5d6d7e")


def write_report(result: dict[str, Any], path: Path) -> None:
    """Write the page for what `demo.run` returned."""
    template = Template((resources.files("weir.demo") / "report.html").read_text("utf-8"))
    path.write_text(
        template.substitute(
            book=html.escape(result["book"]),
            tokens=f"{result['tokens']:,}",
            window=f"{result['model_window']:,}",
            perplexity=_plot(result, "ppl_by_block", "perplexity", 1.0, log=True),
            memory=_plot(result, "bytes_by_block", "cache, MB", 1e-6, log=False),
            rows="\n".join(_row(policy, i) for i, policy in enumerate(result["policies"])),
        ),
        "utf-8",
    )


def _row(policy: dict[str, Any], index: int) -> str:
    cells = (
        f"{policy['ppl']:.1f}",
        f"{policy['ppl_by_block'][-1]:.1f}",
        f"{policy['kv_bytes'] / 1e6:.2f} MB",
        f"{policy['tokens_per_s']:,.0f}",
    )
    name = f'<i style="background:{COLOURS[index % len(COLOURS)]}"></i>'
    name += f"<code>{html.escape(policy['policy'])}</code>"
    return f"<tr><td>{name}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _plot(result: dict[str, Any], key: str, label: str, factor: float, *, log: bool) -> str:
    """One line per policy over the position in the book, as an SVG element."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.fonttype": "none", "font.size": 10}):
        figure, axes = pyplot.subplots(figsize=(7.2, 3.2), layout="constrained")
        for index, policy in enumerate(result["policies"]):
            values = [value * factor for value in policy[key]]
            ends = [min((n + 1) * result["block"], result["tokens"]) for n in range(len(values))]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(ends, values, color=colour, lw=1.8, label=policy["policy"])
        axes.axvline(result["model_window"], color="#888", lw=1, ls=":")
        axes.text(
            result["model_window"],
            1.0,
            " window",
            color="#888",
            va="bottom",
            transform=axes.get_xaxis_transform(),
        )
        axes.set_xlabel("tokens read")
        axes.set_ylabel(label)
        if log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
        target = io.StringIO()
        figure.savefig(target, format="svg", transparent=True)
        pyplot.close(figure)
    svg = target.getvalue()
    return svg[svg.index("<svg") :]
