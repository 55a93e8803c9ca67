"""The demo's report: one HTML page with its plots inside, to be opened without a network."""

from __future__ import annotations

import html
import itertools
import math
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from weir.evals.look import COLORS, DASHES, GRAY, drawing, dress, page_colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes


MOST_SHOWN = 5
"""Characters of an answer; who has forgotten the number may say anything."""
STORY = Template("""<h2>Who still knows?</h2>
<p>Behind the book every policy was told $count names with numbers ($some, &hellip;), read $away
tokens more, and was asked for each number. A right answer has a tick.</p>
<div class="scroll"><table class="answers">
<thead><tr><th>policy</th>$heads</tr></thead>
<tbody>
$answers
</tbody>
</table></div>

<h2>What each policy still holds</h2>
<p>All that was read, from its first token at the left to its ${seen}th at the right, just before
the questions. The stronger the color, the more tokens of a place have a slot, over all layers and
heads. The mark shows where the names were told.</p>
<div class="strips">
<div class="told"><span style="left:$place%">names</span></div>
$strips
</div>""")
"""The part of the page that is there where everybody was asked."""


def write_report(result: dict[str, Any], path: Path) -> None:
    """Write the page for what `demo.run` returned."""
    from weir import __version__

    page = Template((resources.files("weir.evals.demo") / "report.html").read_text("utf-8"))
    policies = result["policies"]
    steady = [policy for policy in policies if policy["slots"] is not None] or policies
    text = page.substitute(
        colors=page_colors(),
        version=__version__,
        book=html.escape(result["book"]),
        tokens=f"{result['tokens']:,}",
        times=f"{result['tokens'] / result['model_window']:.1f}",
        window=f"{result['model_window']:,}",
        block=f"{result['block']:,}",
        knows="<th>still knows</th>" if result["story"] else "",
        rows="\n".join(_row(result, policy) for policy in policies),
        story=_story(result),
        all_perplexity=_plot(result, policies, "ppl_by_block", "perplexity", log=True),
        perplexity=_plot(result, steady, "ppl_by_block", "perplexity"),
        memory=_plot(result, policies, "bytes_by_block", "cache, MB", log=True),
    )
    path.write_text(text, "utf-8")


def _of(looks: tuple[Any, ...], result: dict[str, Any], policy: dict[str, Any]) -> Any:
    """Which of some looks is the policy's, in all plots."""
    return looks[result["policies"].index(policy) % len(looks)]


def _name(result: dict[str, Any], policy: dict[str, Any]) -> str:
    """A policy with its color in front; a phone may break it before the bracket."""
    written = html.escape(policy["policy"]).replace("(", "<wbr>(")
    return f'<i style="background:{_of(COLORS, result, policy)}"></i><code>{written}</code>'


def _row(result: dict[str, Any], policy: dict[str, Any]) -> str:
    cells = [
        f"{policy['ppl']:,.1f}",
        f"{policy['ppl_by_block'][-1]:,.1f}",
        f"{policy['kv_bytes'] / 1e6:,.1f} MB",
    ]
    if result["story"]:
        cells.append(f"{policy['knows']} of {len(result['story']['names'])}")
    return (
        f"<tr><td>{_name(result, policy)}</td>"
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + f'<td class="wide">{policy["tokens_per_s"]:,.0f}</td></tr>'
    )


def _story(result: dict[str, Any]) -> str:
    """Who still knows the names, and what each policy holds; empty where nobody was asked."""
    if not result["story"]:
        return ""
    told = result["story"]
    seen = told["told_at"] + told["away"] + told["said"]
    names = ", ".join(f"{html.escape(name)} has {number}" for name, number in told["names"][:2])
    answers = "\n".join(_answers(result, policy) for policy in result["policies"])
    heads = "".join(
        f"<th>{html.escape(name)}<br>{html.escape(number)}</th>" for name, number in told["names"]
    )
    strips = "\n".join(_strip(result, policy) for policy in result["policies"])
    return STORY.substitute(
        count=len(told["names"]),
        some=names,
        away=f"{told['away']:,}",
        seen=f"{seen:,}",
        place=f"{100 * told['told_at'] / seen:.2f}",
        heads=heads,
        answers=answers,
        strips=strips,
    )


def _answers(result: dict[str, Any], policy: dict[str, Any]) -> str:
    """What a policy answered, as a line of a table."""
    cells = [
        f'<td class="right">{html.escape(said)}&nbsp;✓</td>'
        if said == number
        else f"<td>{html.escape(said if len(said) <= MOST_SHOWN else said[:MOST_SHOWN] + '…')}</td>"
        for said, (_, number) in zip(policy["answers"], result["story"]["names"], strict=True)
    ]
    return f"<tr><td>{_name(result, policy)}</td>{''.join(cells)}</tr>"


def _strip(result: dict[str, Any], policy: dict[str, Any]) -> str:
    """What a policy holds of all that was read, as a bar: the more is left, the stronger."""
    held, told = policy["held"], result["story"]
    color, parts = _of(COLORS, result, policy), len(policy["held"])
    stops = []
    at = 0
    # By the root of the share: one token of fifty is to be seen too. Neighbors alike are one.
    for shade, group in itertools.groupby(round(math.sqrt(share), 2) for share in held):
        end = at + len(list(group))
        alpha = f"{round(255 * shade):02x}"
        stops.append(f"{color}{alpha} {100 * at / parts:.2f}% {100 * end / parts:.2f}%")
        at = end
    seen = told["told_at"] + told["away"] + told["said"]
    words = f"holds {sum(held) / parts:.1%} of {seen:,} tokens"
    return (
        f"<div><p>{_name(result, policy)} {words}</p>"
        f'<div class="strip" role="img" aria-label="{words}" '
        f'style="background:linear-gradient(90deg,{",".join(stops)})"></div></div>'
    )


def _plot(
    result: dict[str, Any],
    policies: list[dict[str, Any]],
    key: str,
    label: str,
    *,
    log: bool = False,
) -> str:
    """One line per policy over the position in the book, as an SVG element."""
    # As narrow as a phone can show with letters that can be read.
    with drawing(f"{key}{log}{len(policies)}", 5.2, 3.6) as (figure, out):
        axes = figure.subplots()
        for policy in policies:
            look = {"color": _of(COLORS, result, policy), "lw": 2, "label": policy["policy"]}
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
    return out[0]


def _edges(result: dict[str, Any], values: list[Any]) -> list[int]:
    """Where the blocks begin, and where the last one ends."""
    return [min(n * result["block"], result["tokens"]) for n in range(len(values) + 1)]


def _dress(axes: Axes, result: dict[str, Any], label: str, log: bool) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, result["tokens"])
    axes.set_xlabel("tokens read")
    axes.set_ylabel(label)
    if log:
        axes.set_yscale("log")
        axes.margins(y=0.1)  # so that the lowest line does not lie on the axis
    else:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    dress(axes, across=False)
    window = result["model_window"]
    if window < result["tokens"]:
        axes.axvline(window, color=GRAY, lw=1, ls=":")
        top = axes.get_xaxis_transform()
        axes.text(window, 1.01, "the model's window", color=GRAY, transform=top)
