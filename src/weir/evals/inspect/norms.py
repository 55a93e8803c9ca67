"""Norms of queries, shifted keys and values, by the length of the prompt: BalanceKV's Table 3.

BalanceKV (Kochetkova et al. 2025), sections 4.5 and B.1: its theorem asks for bounded queries and
keys, and in Llama-3.1-8B-Instruct their Euclidean norms, over all layers and heads, hardly change
with the length of a prompt. Keys are shifted by their mean over the prompt, head by head. In
addition to the paper's interval, which treats all vectors of a prompt as independent, there is an
interval over prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from weir.evals.capture import LayerInputs, capture_each, in_place
from weir.evals.inspect.section import (
    Inspection,
    Picture,
    Section,
    drawing,
    longest,
    passages,
    style_panel,
)
from weir.evals.report import TextTable
from weir.evals.scores import mean_interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = {"queries": "queries", "keys_shifted": "keys, shifted", "values": "values"}
"""The kinds of vectors, by their names in the facts."""
COLORS = ("#2c6e9b", "#7a9a01", "#c0392b")
USUAL = 4096
"""By default, tokens of the longest prompt, if the model's window and the text have as many."""
LENGTHS = 4
"""Number of prompt lengths: the longest, half of it, a quarter and an eighth."""
PROMPTS = 5
"""Largest number of prompts of each length."""
FEWEST = 8
"""Smallest number of tokens in a prompt; shorter lengths are left out."""
_Z = NormalDist().inv_cdf(0.975)


def section(asked: Inspection) -> Section:
    """Measure norms over the chosen layers and heads, by prompt length."""
    most = passages(asked, longest(asked, USUAL), 1, FEWEST).shape[1]
    lengths = [most // 2**n for n in reversed(range(LENGTHS)) if most // 2**n >= FEWEST]
    found = []
    for number, length in enumerate(lengths):
        found.append(measure(asked, passages(asked, length, PROMPTS, FEWEST)))
        asked.on_step(number + 1, len(lengths))
    alt = "Mean norms of queries, shifted keys and values by prompt length."
    picture = Picture("norms", draw(found), alt)
    title = "Norms of queries, keys and values"
    text = _text(asked, found)
    return Section("norms", title, text, (picture,), _table(found), {"lengths": found})


def measure(asked: Inspection, prompts: Tensor) -> dict[str, Any]:
    """Measure norms of vectors of prompts [prompts, length]. At any time, only the vectors of one
    prompt in one layer are in memory.

    Returns:
        "tokens" (of each prompt) and "prompts" (their number), and for each name of `NAMES`: the
        "mean" norm of all vectors; "reach", the half-width of the paper's interval for one prompt,
        with vectors treated as independent; "reach_over_prompts", the half-width of the interval
        over prompts, None for one prompt; and the mean norms "by_prompt" and "by_layer".
    """

    def take(layer: LayerInputs) -> Tensor:
        """Return for each kind the number of vectors, the sum of their norms, and the sum of the
        squares of their norms [kinds, 3].
        """
        group = layer.queries.shape[1] // layer.keys.shape[1]
        found = []
        for name, norms in norms_of(layer).items():
            heads = asked.heads if name == "queries" else asked.kv_heads(group)
            chosen = (norms if heads is None else norms[list(heads)]).double()
            found.append([chosen.numel(), float(chosen.sum()), float(chosen.square().sum())])
        return torch.tensor(found, dtype=torch.float64)

    heard = [capture_each(asked.model, ids, take, asked.layers) for ids in prompts]
    sums = torch.stack([torch.stack(list(one.values())) for one in heard])
    facts: dict[str, Any] = {"tokens": prompts.shape[1], "prompts": len(prompts)}
    for name, of_kind in zip(NAMES, sums.unbind(2), strict=True):
        count, total, squares = of_kind.sum(dim=1).T
        variance = (squares / count - (total / count) ** 2).clamp_min(0)
        means = (total / count).tolist()
        count_in, total_in, _ = of_kind.sum(dim=0).T
        by_layer = (total_in / count_in).tolist()
        facts[name] = {
            "mean": fmean(means),
            "reach": float((_Z * (variance / (count - 1).clamp_min(1)).sqrt()).mean()),
            "reach_over_prompts": mean_interval(means)[1],
            "by_prompt": means,
            "by_layer": dict(zip(map(str, heard[0]), by_layer, strict=True)),
        }
    return facts


def norms_of(layer: LayerInputs) -> dict[str, Tensor]:
    """The Euclidean norms of a layer's vectors, by name [heads or kv_heads, length]."""
    keys = in_place(layer, layer.keys)
    vectors = (in_place(layer, layer.queries), keys - keys.mean(dim=2, keepdim=True), layer.values)
    return {name: x[0].norm(dim=-1) for name, x in zip(NAMES, vectors, strict=True)}


def draw(found: Sequence[dict[str, Any]]) -> Figure:
    """Draw mean norms by prompt length, a panel per kind. Bars are intervals over prompts or, if
    there is only one prompt, the paper's interval.
    """
    from matplotlib.ticker import MaxNLocator, NullLocator

    with drawing(4.6) as figure:
        panels = figure.subplots(len(NAMES), 1, sharex=True)
        lengths = [norms["tokens"] for norms in found]
        for axes, (name, kind), color in zip(panels, NAMES.items(), COLORS, strict=True):
            means = [norms[name]["mean"] for norms in found]
            reach = [norms[name]["reach_over_prompts"] or norms[name]["reach"] for norms in found]
            axes.errorbar(lengths, means, reach, marker="o", ms=4, lw=1.5, capsize=3, color=color)
            axes.set_title(kind, loc="left", fontsize=9)
            axes.set_ylim(0, 1.25 * max(m + r for m, r in zip(means, reach, strict=True)))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            style_panel(axes)
        panels[-1].set_xscale("log", base=2)
        panels[-1].set_xticks(lengths, [f"{n:,}" for n in lengths])
        panels[-1].xaxis.set_minor_locator(NullLocator())
        panels[-1].set_xlabel("length of the prompt, tokens")
        figure.supylabel("mean norm (no unit)", size=9)
    return figure


def _text(asked: Inspection, found: Sequence[dict[str, Any]]) -> str:
    shown = len(found[-1]["queries"]["by_layer"])
    over = "all layers" if asked.layers is None else f"{shown} layer{'s'[: shown > 1]}"
    heads = "all heads" if asked.heads is None else "the chosen query heads with their KV heads"
    return (
        f"The mean Euclidean norm over {over}, {heads} and all tokens of a prompt. Keys are "
        "shifted by their mean over the prompt, head by head, as BalanceKV does before it "
        "compresses. This changes no attention. Its Table 3 has Llama-3.1-8B-Instruct and prompts "
        "of 2,281 to 21,274 tokens: queries 14.45 to 15.21, keys 15.35 to 15.95, values 3.34 to "
        "3.37, so they are bounded, as its theorem requires. The first ± is the paper's 95 % "
        "interval, which treats all vectors of a prompt as independent. The second ± is the "
        "interval over prompts. The bars show the second or, with only one prompt, the first."
    )


def _table(found: Sequence[dict[str, Any]]) -> TextTable:
    rows = []
    for norms in found:
        cells = [f"{norms['tokens']:,}", str(norms["prompts"])]
        for name in NAMES:
            mean, reach, between, *_ = norms[name].values()
            cells.append(f"{mean:.4f} ± {reach:.4f}")
            cells.append("—" if between is None else f"± {between:.3f}")
        rows.append(tuple(cells))
    heads = [head for kind in NAMES.values() for head in (kind, "over prompts")]
    return TextTable(("tokens", "prompts", *heads), tuple(rows))
