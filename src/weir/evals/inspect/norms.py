"""Norms of queries, shifted keys and values, by the length of the prompt: BalanceKV's Table 3.

BalanceKV (Kochetkova et al. 2025), sections 4.5 and B.1: its theorem asks for bounded queries and
keys, and in Llama-3.1-8B-Instruct their Euclidean norms, over all layers and heads, hardly change
with the length of a prompt. Keys are shifted by their mean over the prompt, head by head, which
changes no attention; BalanceKV does so before it compresses them.

The paper's interval is that of a mean over all vectors of one prompt, as if they were independent.
Beside it stands the interval over several prompts of one length, which is what another prompt would
show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING, Any

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

NAMES = {"queries": "queries", "keys, shifted": "keys_shifted", "values": "values"}
"""The kinds of vectors, with their names in the facts."""
KINDS = tuple(NAMES)
USUAL = 4096
"""Tokens of the longest prompt where the model's window holds them."""
LENGTHS = 4
"""Lengths of prompts: the longest, half of it, a quarter and an eighth."""
PROMPTS = 5
"""Of each length, at most."""
FEWEST = 8
"""Tokens of the shortest prompt."""
_Z = NormalDist().inv_cdf(0.975)


@dataclass
class Sums:
    """Number of vectors, sum of their norms, and sum of the norms' squares."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, norms: Tensor) -> None:
        """Add norms, of any shape."""
        norms = norms.double()
        self.count += norms.numel()
        self.total += float(norms.sum())
        self.squares += float(norms.square().sum())

    @property
    def mean(self) -> float:
        """The mean norm."""
        return self.total / self.count

    @property
    def reach(self) -> float:
        """Half-width of the mean's 95 % interval, with vectors taken as independent."""
        variance = max(0.0, self.squares / self.count - self.mean**2)
        return _Z * math.sqrt(variance / max(1, self.count - 1))


@dataclass
class Norms:
    """The norms of prompts of one length.

    Attributes:
        length: length of the prompts in tokens.
        prompts: for each prompt, the sums by kind.
        layers: by layer and kind, the sums over all prompts.
    """

    length: int
    prompts: list[dict[str, Sums]] = field(default_factory=list)
    layers: dict[int, dict[str, Sums]] = field(default_factory=dict)

    def mean(self, kind: str) -> float:
        """The mean norm over all vectors of all prompts."""
        return fmean(sums[kind].mean for sums in self.prompts)

    def reach(self, kind: str) -> float:
        """Half-width of the paper's interval: one prompt, vectors taken as independent."""
        return fmean(sums[kind].reach for sums in self.prompts)

    def between(self, kind: str) -> float | None:
        """Half-width of the interval over prompts; None for one prompt."""
        return mean_interval([sums[kind].mean for sums in self.prompts])[1]


def section(asked: Inspection) -> Section:
    """Norms over the chosen layers and heads, by prompt length.

    Raises:
        WeirError: the text is too short, or the model cannot be served.
    """
    whole = longest(asked, USUAL)
    most = passages(asked, whole, 1, FEWEST).shape[1]
    lengths = [most // 2**n for n in reversed(range(LENGTHS)) if most // 2**n >= FEWEST]
    found = []
    for number, length in enumerate(lengths):
        found.append(measure(asked, passages(asked, length, PROMPTS, FEWEST)))
        asked.on_step(number + 1, len(lengths))
    alt = "Mean norms of queries, shifted keys and values by prompt length."
    picture = Picture("norms", draw(found), alt)
    title = "Norms of queries, keys and values"
    return Section("norms", title, _text(asked, found), (picture,), _table(found), _facts(found))


def measure(asked: Inspection, prompts: Tensor) -> Norms:
    """Measure norms of prompts [prompts, length], with one layer of one in memory at a time."""
    norms = Norms(prompts.shape[1])

    def take(sums: dict[str, Sums], layer: LayerInputs) -> None:
        group = layer.queries.shape[1] // layer.keys.shape[1]
        mine = norms.layers.setdefault(layer.layer, {kind: Sums() for kind in KINDS})
        for kind, of_head in norms_of(layer).items():
            heads = asked.heads if kind == KINDS[0] else asked.kv_heads(group)
            chosen = of_head if heads is None else of_head[list(heads)]
            sums[kind].add(chosen)
            mine[kind].add(chosen)

    for ids in prompts:
        sums = {kind: Sums() for kind in KINDS}
        capture_each(asked.model, ids, partial(take, sums), asked.layers)
        norms.prompts.append(sums)
    return norms


def norms_of(layer: LayerInputs) -> dict[str, Tensor]:
    """The Euclidean norms of a layer's vectors, by kind [heads or kv_heads, length]."""
    keys = in_place(layer, layer.keys)
    vectors = (in_place(layer, layer.queries), keys - keys.mean(dim=2, keepdim=True), layer.values)
    return {kind: x[0].norm(dim=-1) for kind, x in zip(KINDS, vectors, strict=True)}


def draw(found: Sequence[Norms]) -> Figure:
    """Draw mean norms by prompt length, a panel per kind; bars are intervals over prompts."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    with drawing(4.6) as figure:
        panels = figure.subplots(len(KINDS), 1, sharex=True)
        lengths = [norms.length for norms in found]
        for axes, kind, color in zip(panels, KINDS, ("#2c6e9b", "#7a9a01", "#c0392b"), strict=True):
            means = [norms.mean(kind) for norms in found]
            reach = [norms.between(kind) or norms.reach(kind) for norms in found]
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


def _text(asked: Inspection, found: Sequence[Norms]) -> str:
    shown = len(found[-1].layers)
    over = "all layers" if asked.layers is None else f"{shown} layer{'s'[: shown > 1]}"
    heads = "all heads" if asked.heads is None else f"{len(asked.heads)} query heads and theirs"
    return (
        f"The mean Euclidean norm over {over}, {heads} and all tokens of a prompt. Keys are "
        "shifted by their mean over the prompt, head by head, which changes no attention: "
        "BalanceKV does so before it compresses. Its Table 3 has Llama-3.1-8B-Instruct and prompts "
        "of 2,281 to 21,274 tokens: queries 14.45 to 15.21, keys 15.35 to 15.95, values 3.34 to "
        "3.37, so bounded as its theorem asks. After ± stands the paper's 95 % interval, which "
        "takes all vectors of a prompt as independent; then that over prompts, which the bars show."
    )


def _table(found: Sequence[Norms]) -> TextTable:
    rows = []
    for norms in found:
        cells = []
        for kind in KINDS:
            between = norms.between(kind)
            cells.append(f"{norms.mean(kind):.4f} ± {norms.reach(kind):.4f}")
            cells.append("—" if between is None else f"± {between:.3f}")
        rows.append((f"{norms.length:,}", str(len(norms.prompts)), *cells))
    heads = [name for kind in KINDS for name in (kind, "over prompts")]
    return TextTable(("tokens", "prompts", *heads), tuple(rows))


def _facts(found: Sequence[Norms]) -> dict[str, Any]:
    return {
        "lengths": [
            {
                "tokens": norms.length,
                "prompts": len(norms.prompts),
                **{
                    NAMES[kind]: {
                        "mean": norms.mean(kind),
                        "reach": norms.reach(kind),
                        "reach_over_prompts": norms.between(kind),
                        "by_prompt": [sums[kind].mean for sums in norms.prompts],
                        "by_layer": {
                            str(layer): sums[kind].mean for layer, sums in norms.layers.items()
                        },
                    }
                    for kind in KINDS
                },
            }
            for norms in found
        ]
    }
